"""Messages as Anthropic's own client reads them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from http_fakes import Front, http_front
from manylora.v1 import worker_pb2
from router_fakes import STARTED, ids_of, say, tokens

HI: Any = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]


def client_of(front: Front, key: str | None = None) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=front.url, api_key=key or front.key, max_retries=0)


async def test_an_answer_is_anthropics_to_the_letter() -> None:
    async with http_front(say("hello", cached_prompt_tokens=2)) as front, client_of(front) as client:
        raw = await client.messages.with_raw_response.create(
            model="upper", max_tokens=20, system="be brief", messages=HI, stop_sequences=["lo"]
        )
        message = Message.model_validate_json(await raw.http_response.aread(), strict=True)
        [executed] = [request for worker in front.cluster.workers for request in worker.executed]
    assert list(executed.prompt_token_ids) == ids_of("system: be brief\nuser: hi\n")
    assert (message.model, message.role, message.type) == ("upper", "assistant", "message")
    [block] = message.content
    assert block.type == "text"
    assert block.text == "hel"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (24, 2)
    assert message.usage.output_tokens == 5


@pytest.mark.parametrize(("max_tokens", "reason", "text"), [(20, "end_turn", "hello world"), (4, "max_tokens", "hell")])
async def test_a_stream_adds_up(max_tokens: int, reason: str, text: str) -> None:
    async with http_front() as front, client_of(front) as client:
        names = []
        async with client.messages.stream(model="tiny", max_tokens=max_tokens, messages=HI) as stream:
            async for event in stream:
                names.append(event.type)
            message = await stream.get_final_message()
    assert [name for name in names if name not in ("text", "content_block_delta")] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    assert (message.stop_reason, message.content[0].text) == (reason, text)  # type: ignore[union-attr]
    assert message.usage.output_tokens == len(text)


async def test_an_answer_goes_on_with_its_beginning() -> None:
    async with http_front() as front, client_of(front) as client:
        begun: Any = [*HI, {"role": "assistant", "content": "he"}]
        await client.messages.create(model="tiny", max_tokens=4, messages=begun)
        [executed] = [request for worker in front.cluster.workers for request in worker.executed]
        assert list(executed.prompt_token_ids) == ids_of("user: hi\nassistant: he")


async def test_tokens_are_counted() -> None:
    async with http_front() as front, client_of(front) as client:
        counted = await client.messages.count_tokens(model="tiny", messages=HI)
        assert counted.input_tokens == len("user: hi\n")


async def test_vllms_stop_is_kept() -> None:
    async with http_front(say("hello")) as front, client_of(front) as client:
        told = await client.messages.create(model="tiny", max_tokens=9, messages=HI, extra_body={"stop": "lo"})
        assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "lo")
        assert told.content[0].text == "hel"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n: is not supported"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output: is not"),
        ({"return_token_ids": True}, "return_token_ids: is not"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids: is not"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop and stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]}, "at most 4096 are read"),
    ],
)
async def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    async with http_front() as front, client_of(front) as client:
        with pytest.raises(anthropic.BadRequestError, match=words):
            await client.messages.create(model="tiny", max_tokens=9, **{"messages": HI, "extra_body": fields})


async def test_errors_have_anthropics_form() -> None:
    async def broken(request: worker_pb2.ExecuteRequest) -> Any:
        yield STARTED
        yield tokens(1, 0, ids_of("ab"))

    async with http_front(broken) as front, client_of(front) as client:
        async with client_of(front, "mlk-nobody") as nobody:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await nobody.messages.create(model="tiny", max_tokens=1, messages=HI)
        assert unknown.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": unknown.value.body["error"]["message"]},  # type: ignore[index]
        }
        for wrong in ({"tools": [{"name": "x", "input_schema": {}}]}, {"top_p": 7}, {"max_tokens": 10**6}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
                await client.messages.create(model="tiny", max_tokens=1, messages=HI, extra_body=wrong)
        with pytest.raises(anthropic.NotFoundError, match="model: adapter 'secret'"):
            await client.messages.create(model="secret", max_tokens=1, messages=HI)
        stream = await client.messages.create(model="tiny", max_tokens=9, messages=HI, stream=True)

        async def read() -> None:
            async for _ in stream:
                pass

        with pytest.raises(anthropic.APIError, match="api_error"):
            await read()
