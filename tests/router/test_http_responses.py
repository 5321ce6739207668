"""Responses as OpenAI's own client reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_fakes import http_front
from manylora.v1 import worker_pb2
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from router_fakes import STARTED, ids_of, tokens

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
JSON = {"type": "json_object"}
CONVERSATION: Any = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
]


async def test_an_answer_is_openais_to_the_letter() -> None:
    async with http_front() as front, front.openai() as client:
        raw = await client.responses.with_raw_response.create(
            model="upper", input=CONVERSATION, instructions="d", metadata={"k": "v"}, store=False
        )
        response = Response.model_validate_json(raw.content, strict=True)
        [executed] = [request for worker in front.cluster.workers for request in worker.executed]
    assert list(executed.prompt_token_ids) == ids_of("system: d\nuser: a\nassistant: b\nuser: c\n")
    assert (response.output_text, response.status, response.model) == ("hello world", "completed", "upper")
    assert (response.instructions, response.metadata) == ("d", {"k": "v"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (39, 11, 50)


@pytest.mark.parametrize("most", [None, 4])
async def test_a_stream_adds_up(most: int | None) -> None:
    async with http_front() as front, front.openai() as client:
        raw = await client.responses.with_raw_response.create(
            model="tiny", input="hi", stream=True, max_output_tokens=most
        )
        lines = [line async for line in raw.http_response.aiter_lines() if line]
    events = [EVENTS.validate_json(line.removeprefix("data: "), strict=True) for line in lines[1::2]]
    assert [f"event: {event.type}" for event in events] == lines[::2]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == ("response.completed" if most is None else "response.incomplete")
    assert last.response.output_text == text == ("hello world" if most is None else "hell")
    assert events[0].response.status == "in_progress"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"nobody": 1}, "nobody"),
        ({"n": 2}, "n"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"text": {"format": JSON}, "response_format": JSON}, "text.format"),
        ({"response_format": JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text.format"),
        ({"input": [{"type": "function_call", "name": "f"}] * 4097}, "input"),
    ],
)
async def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with http_front() as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", cast_to=dict, body={"model": "tiny", "input": "hi", **fields})
        assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"text": {"format": JSON}}, {"response_format": JSON}, {"structured_outputs": {"json_object": True}}],
)
async def test_a_constraint_is_kept_by_each_of_its_names(fields: dict[str, Any]) -> None:
    async with http_front() as front, front.openai() as client:
        body = {"model": "tiny", "input": "hi", "n": 1, "return_token_ids": False, **fields}
        told = await client.post("/responses", cast_to=dict, body=body)
        [executed] = [request for worker in front.cluster.workers for request in worker.executed]
    assert executed.constraint.json_object
    assert told["text"]["format"] == (JSON if "text" in fields else {"type": "text"})


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    async def broken(request: worker_pb2.ExecuteRequest) -> Any:
        yield STARTED
        yield tokens(1, len(request.emitted[0].token_ids) if request.emitted else 0, ids_of("ab"))

    async with http_front(broken) as front, front.openai() as client:
        raw = await client.responses.with_raw_response.create(model="tiny", input="hi", stream=True)
        lines = [line async for line in raw.http_response.aiter_lines() if line]
    last = EVENTS.validate_json(lines[-1].removeprefix("data: "), strict=True)
    assert (last.type, last.code) == ("error", "worker_lost")
