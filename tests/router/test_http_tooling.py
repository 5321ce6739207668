"""Tools and reasoning through every endpoint, as the clients' own packages read them."""

from __future__ import annotations

import functools
import json
import re
import time
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from http_fakes import Front, http_front
from manylora_router.dialect.dialect import Dialect
from manylora_router.front.http.api.tooling import MAX_TOOLS, read_anthropic_tools, read_arguments, read_tools
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_TEXT_BYTES
from manylora_sim.fake_text import FakeText
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from router_fakes import say

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ 'tool' }}{{ m.tool_calls }}{{ enable_thinking }}</think>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT: Any = [{"type": "function", "strict": None, **FUNCTION}]
ANTHROPICS: Any = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>'
HI: Any = [{"role": "user", "content": "hi"}]
JSON = {"type": "json_object"}
MOST = 200


def front_of(answer: str, template: str = TEMPLATE) -> Any:
    return http_front(say(answer, per_frame=3), text=FakeText(chat_template=template))


def anthropic_of(front: Front) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=front.url, api_key=front.key, max_retries=0)


def prompt_of(front: Front) -> str:
    [executed] = [request for worker in front.cluster.workers for request in worker.executed]
    return bytes(token_id - 3 for token_id in executed.prompt_token_ids).decode()


async def test_a_whole_chat_answer() -> None:
    async with front_of(ANSWER) as front, front.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST, tool_choice="auto"
        )
        answer = ChatCompletion.model_validate_json(raw.content, strict=True)
        assert prompt_of(front) == "tool weather\nuser: hi\n"
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "Where?"  # type: ignore[attr-defined]
    calls: Any = choice.message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in calls] == [("weather", '{"city": "Paris"}')] * 2
    assert len({each.id for each in calls}) == 2
    assert all(each.id.startswith("call_") for each in calls)


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_a_streamed_chat_answer_adds_up(one_by_one: bool) -> None:
    async with front_of(ANSWER) as front, front.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST, stream=True, parallel_tool_calls=not one_by_one
        )
        lines = [line async for line in raw.http_response.aiter_lines() if line]
        chunks = [ChatCompletionChunk.model_validate_json(line[6:], strict=True) for line in lines[:-1]]
        whole: Any = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST)
    deltas: Any = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Where?"
    entries = [entry for delta in deltas for entry in delta.tool_calls or ()]
    count = 1 if one_by_one else 2
    assert [(e.index, e.function.name, e.type) for e in entries if e.id] == [
        (i, "weather", "function") for i in range(count)
    ]
    assert len(entries) > 2 * count
    for index in range(count):
        given = "".join(e.function.arguments for e in entries if e.index == index)
        assert given == whole.choices[0].message.tool_calls[index].function.arguments
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


async def test_the_sdks_own_stream_helper_reads_it() -> None:
    async with (
        front_of(ANSWER) as front,
        front.openai() as client,
        client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST) as stream,
    ):
        final: Any = await stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["weather"] * 2


async def test_malformed_calls_are_text_and_cut_ones_end_by_length() -> None:
    async with front_of(BROKEN) as front, front.openai() as client:
        answer: Any = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST)
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (BROKEN, None)
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST, stream=True
        )
        chunks: Any = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "oops}}</tool_call>"
        assert chunks[-1].choices[0].finish_reason == "stop"
    async with front_of(CALL) as front, front.openai() as client:
        cut: Any = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=60)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (CALL[:60], "length")


async def test_without_tools_nothing_is_read_but_reasoning() -> None:
    async with front_of(ANSWER) as front, front.openai() as client:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            plain: Any = await client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=MOST, **more, extra_body={"include_reasoning": False}
            )
            assert plain.choices[0].message.content == f"I look.\n{CALL}\n{CALL}"
            assert not hasattr(plain.choices[0].message, "reasoning_content")
        prompts = {bytes(r.prompt_token_ids) for worker in front.cluster.workers for r in worker.executed}
        assert len(prompts) == 1


async def test_a_conversation_with_calls_reaches_the_template() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
    said: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    rendered = {**calls[0], "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    lines = [
        "user: hi",
        f"assistant: {json.dumps({'reasoning_content': 'hm', 'tool_calls': [rendered]})}",
        f"tool: sunny{json.dumps({'tool_call_id': 'c1', 'name': 'weather'})}",
        "",
    ]
    async with front_of("ok") as front, front.openai() as client:
        await client.chat.completions.create(model="tiny", messages=said)
        assert prompt_of(front) == "\n".join(lines)
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    async with front_of("ok") as front, front.openai() as client:
        await client.responses.create(model="tiny", input=items)
        assert prompt_of(front) == "\n".join(lines)
    for between in ([], [items[1]]):  # thoughts before a text, and before a call behind it
        text: Any = {"role": "assistant", "content": "a"}
        async with front_of("ok") as front, front.openai() as client:
            await client.responses.create(model="tiny", input=[*items[:2], text, *between, *items[2:]])
            told = {"reasoning_content": "\n".join(["hm"] * (1 + len(between))), "tool_calls": [rendered]}
            assert prompt_of(front) == "\n".join([lines[0], f"assistant: a{json.dumps(told)}", *lines[2:]])
    blocks: Any = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    async with front_of("ok") as front, anthropic_of(front) as client:
        await client.messages.create(model="tiny", messages=blocks, max_tokens=9)
        assert prompt_of(front) == "\n".join(lines)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 7}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": 7}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 9999}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * (MAX_TOOLS + 1)}]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with front_of("ok") as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/chat/completions", cast_to=dict, body={"model": "tiny", "messages": HI, **body})
        assert refused.value.param == param


def arguments_of(text: str) -> tuple[Any, list[str]]:
    fields = Fields({"arguments": text})
    return read_arguments(fields), [each.description for each in fields.found]


@pytest.mark.parametrize("text", ["{}", ' \t\r\n{"a": [1, -2.5e3, true, null, "é"]}\n', '{"a":' * 64 + "1" + "}" * 64])
def test_arguments_are_an_objects_text(text: str) -> None:
    assert arguments_of(text) == (json.loads(text), [])


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "7", "[]", '"{}"', "{", "{} {}", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "{'a': 1}"),
        *(f"{space}{{}}" for space in ("\xa0", "\x0b", "\x0c", "\u2028", "\x85", "\x1c", "\ufeff")),
        *(f"{{}}{space}" for space in ("\xa0", "\x0b", "\u2028")),
        *('{"a":' * depth + "1" + "}" * depth for depth in (65, 980, 100_000)),
        '{"a": "\\ud800"}',
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_arguments_that_are_none_are_refused(text: str) -> None:
    found, [wrong] = arguments_of(text)
    assert found == {}
    assert wrong.startswith(("must be the text of a JSON object", "has half of a surrogate pair"))


def test_arguments_hold_nobody_up() -> None:
    """They are read on the event loop: as many as a prompt may have, in the time of a parser; more, not at all."""
    most = '{"a":"' + "x" * (MAX_TEXT_BYTES - 8) + '"}'
    began = time.process_time()
    assert arguments_of(most)[1] == []
    assert time.process_time() - began < 0.15  # a character at a time takes more than twice that
    assert arguments_of(most + " ") == ({}, [f"has more than {MAX_TEXT_BYTES} bytes"])


async def test_a_template_that_takes_no_tools_says_so() -> None:
    called = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    said: Any = [
        *HI,
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    async with front_of("ok", "{{ messages }}") as front, front.openai() as client:
        for more, words in (
            ({"messages": HI, "tools": TOOLS}, "tools: .*template"),
            ({"messages": said}, "results of"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(model="tiny", **more)  # type: ignore[call-overload]
    async with front_of("ok", "{{ tools }}") as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError, match="--tool-parser"):
            await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)


async def test_responses() -> None:
    events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with front_of(ANSWER) as front, front.openai() as client:
        raw = await client.responses.with_raw_response.create(
            model="tiny", input="hi", tools=FLAT, max_output_tokens=MOST
        )
        whole = Response.model_validate_json(raw.content, strict=True)
        streamed = await client.responses.with_raw_response.create(
            model="tiny", input="hi", tools=FLAT, max_output_tokens=MOST, stream=True
        )
        lines = [line async for line in streamed.http_response.aiter_lines() if line.startswith("data")]
    output: Any = whole.output
    assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0].content[0].text == "Where?"
    assert (whole.output_text, output[2].name, output[2].arguments) == ("I look.", "weather", '{"city": "Paris"}')
    assert whole.tools[0].type == "function"
    told = [events.validate_json(line.removeprefix("data: "), strict=True) for line in lines]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    last = told[-1].response
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    arguments = [e.delta for e in told if e.type == "response.function_call_arguments.delta" and e.output_index == 3]
    assert "".join(arguments) == output[3].arguments
    added = [event.output_index for event in told if event.type == "response.output_item.added"]
    assert added == [event.output_index for event in told if event.type == "response.output_item.done"] == [0, 1, 2, 3]


THOUGHT: Any = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
THOUGHTS = json.dumps({"reasoning_content": "hm"})
OTHER: Any = {**THOUGHT, "content": [{"type": "reasoning_text", "text": "so"}]}


@pytest.mark.parametrize(
    ("items", "lines"),
    [
        ([*HI, THOUGHT, {"role": "assistant", "content": "a"}], ["user: hi", f"assistant: a{THOUGHTS}"]),
        (
            [*HI, THOUGHT, OTHER, {"role": "assistant", "content": "a"}, *HI],
            ["user: hi", f"assistant: a{THOUGHTS.replace('hm', 'hm__so')}", "user: hi"],
        ),
        ([*HI, {"role": "assistant", "content": "a"}, THOUGHT], ["user: hi", f"assistant: a{THOUGHTS}"]),
        ([*HI, THOUGHT, *HI], ["user: hi", "user: hi"]),  # of an answer that was cut: templates refuse an empty one
        ([*HI, THOUGHT], ["user: hi"]),
        ([*HI, {**THOUGHT, "content": []}, *HI], ["user: hi", "user: hi"]),
    ],
)
async def test_thoughts_are_of_the_answer_that_they_stand_by(items: Any, lines: list[str]) -> None:
    async with front_of("ok") as front, front.openai() as client:
        await client.responses.create(model="tiny", input=items)
        assert prompt_of(front).replace("\\n", "__") == "\n".join([*lines, ""])


async def test_anthropics_messages() -> None:
    async with front_of(ANSWER) as front, anthropic_of(front) as client:
        raw = await client.messages.with_raw_response.create(
            model="tiny", max_tokens=MOST, messages=HI, tools=ANTHROPICS, thinking={"type": "adaptive"}
        )
        message = Message.model_validate_json(await raw.http_response.aread(), strict=True)
        async with client.messages.stream(model="tiny", max_tokens=MOST, messages=HI, tools=ANTHROPICS) as stream:
            final = await stream.get_final_message()
    for each in (message, final):
        content: Any = each.content
        assert [block.type for block in content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (content[0].thinking, content[1].text) == ("Where?", "I look.")
        assert (content[2].name, content[2].input) == ("weather", {"city": "Paris"})
        assert each.stop_reason == "tool_use"


def grammar_of(front: Front) -> str:
    [executed] = [request for worker in front.cluster.workers for request in worker.executed]
    return executed.constraint.grammar


NAMED: Any = {"type": "function", "function": {"name": "weather"}}
OTHER: Any = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("more", "calls", "most"),
    [
        ({"tool_choice": "required"}, ["weather", "other"], None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "other"], 1),
        ({"tool_choice": NAMED}, ["weather"], 1),
        ({"tool_choice": "auto"}, [], None),
    ],
)
async def test_calls_that_must_be_are_constrained(more: Any, calls: list[str], most: int | None) -> None:
    tools = [*TOOLS, OTHER]
    async with front_of(f"{CALL}\n{CALL}") as front, front.openai() as client:
        answer: Any = await client.chat.completions.create(
            model="tiny", messages=HI, tools=tools, max_tokens=MOST, **more
        )
        grammar = grammar_of(front)
        assert prompt_of(front) == "tool weather\ntool other\nuser: hi\n"
    assert [name for name in ("weather", "other") if f'\\"name\\": \\"{name}\\"' in grammar] == calls
    assert ("call)*" in grammar) == (most is None and calls != [])
    assert len(answer.choices[0].message.tool_calls) == (most or 2)
    assert answer.choices[0].finish_reason == ("stop" if more["tool_choice"] is NAMED else "tool_calls")


async def test_calls_must_be_in_every_endpoint() -> None:
    grammars = set()
    async with front_of(CALL) as front, front.openai() as client:
        await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice=NAMED)
        grammars.add(grammar_of(front))
    async with front_of(CALL) as front, front.openai() as client:
        answer = await client.responses.create(
            model="tiny",
            input="hi",
            tools=FLAT,
            tool_choice={"type": "function", "name": "weather"},
            max_output_tokens=MOST,
        )
        assert (answer.output[0].type, answer.tool_choice) == ("function_call", answer.tool_choice)
        grammars.add(grammar_of(front))
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        async with front_of(CALL) as front, anthropic_of(front) as anthropics:
            message = await anthropics.messages.create(
                model="tiny",
                messages=HI,
                tools=ANTHROPICS,
                tool_choice=choice,
                max_tokens=MOST,  # type: ignore[call-overload]
            )
            assert (message.content[0].type, message.stop_reason) == ("tool_use", "tool_use")
            grammars.add(grammar_of(front))
    [grammar] = grammars
    assert grammar.startswith('start: ("<think>" thought SPACE?)? calls\n')


async def test_what_an_answer_must_be_leaves_room_for_calls() -> None:
    more: Any = {"response_format": JSON, "tool_choice": "auto"}
    async with front_of(CALL) as front, front.openai() as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST, **more)
        rules = grammar_of(front).split("\n")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert rules[0].endswith("(answer | calls)")
    assert rules[-1].startswith('answer: %json {"type": "object"')
    async with front_of("hm</think>{}") as front, front.openai() as client:
        await client.chat.completions.create(model="tiny", messages=HI, response_format=JSON)  # type: ignore[call-overload]
        assert grammar_of(front).startswith('start: ("<think>" thought SPACE?)? answer')


LLAMA = "{% if tools %}<|python_tag|>{% endif %}{{ 'tool' }}"
STRICT: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
STRICT_ARRAY = {"name": "f", "parameters": {"type": "array"}}


async def test_strict_tools_are_kept_where_the_model_may_call_them() -> None:
    grammars = set()
    said = f"Well.\n{CALL}"
    async with front_of(said) as front, front.openai() as client:
        answer: Any = await client.chat.completions.create(
            model="tiny", messages=HI, tools=[STRICT, OTHER], max_tokens=MOST
        )
        grammar = grammar_of(front)
    assert (answer.choices[0].message.content, len(answer.choices[0].message.tool_calls)) == ("Well.", 1)
    assert grammar.startswith('start: ("<think>" thought SPACE?)? said\n')
    assert "parameters_0: %json" in grammar
    assert 'parameters_1[suffix="</tool_call>"]' in grammar
    async with front_of(said) as front, front.openai() as client:
        await client.chat.completions.create(model="tiny", messages=HI, tools=[STRICT], max_tokens=MOST)
        grammars.add(grammar_of(front))
    async with front_of(said) as front, front.openai() as client:
        flat: Any = [{**FLAT[0], "strict": True}]
        told: Any = await client.responses.create(model="tiny", input="hi", tools=flat, max_output_tokens=MOST)
        assert [(each.strict, each.name) for each in told.tools] == [(True, "weather")]
        grammars.add(grammar_of(front))
    async with front_of(said) as front, anthropic_of(front) as anthropics:
        own: Any = [{**ANTHROPICS[0], "strict": True}]
        await anthropics.messages.create(model="tiny", messages=HI, tools=own, max_tokens=MOST)
        grammars.add(grammar_of(front))
    assert len(grammars) == 1


async def test_strict_is_no_matter_where_no_call_or_one_must_be() -> None:
    for template, more in ((TEMPLATE, {"tool_choice": "none"}), (LLAMA, {"tool_choice": NAMED})):
        async with front_of(CALL, template) as front, front.openai() as client:
            await client.chat.completions.create(model="tiny", messages=HI, tools=[STRICT], max_tokens=MOST, **more)
            assert "said" not in grammar_of(front)


async def test_strict_that_no_mark_begins_is_refused() -> None:
    async with front_of("ok", LLAMA) as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError, match="no mark begins this model's calls") as refused:
            await client.chat.completions.create(model="tiny", messages=HI, tools=[OTHER, STRICT], max_tokens=MOST)
        assert refused.value.param == "tools[1].function.strict"
        await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=MOST)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": OTHER, "tools": TOOLS}, "tool_choice", "'other' is none of the tools"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.type", "except as 'function'"),
        (
            {"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice",
            "leave out",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{**OTHER, "function": {"name": "f", "parameters": {"type": "array"}}}],
            },
            "tools",
            "f.parameters.type: must be object",
        ),
        ({"tools": [STRICT, {**OTHER, "function": {**STRICT_ARRAY, "strict": True}}]}, "tools", "f.parameters.type"),
        ({"tools": [{**OTHER, "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true or false"),
        (
            {
                "tool_choice": "required",
                "tools": [{**OTHER, "function": {"name": "f", "parameters": {"dependentSchemas": {"a": {}}}}}],
            },
            "tools",
            "in parameters_0: at 'dependentSchemas': is not supported",
        ),
    ],
)
async def test_calls_that_cannot_be_made_sure_are_refused(more: dict[str, Any], param: str, words: str) -> None:
    async with front_of("ok") as front, front.openai() as client:
        with pytest.raises(openai.BadRequestError, match=re.escape(words)) as refused:
            await client.post("/chat/completions", cast_to=dict, body={"model": "tiny", "messages": HI, **more})
        assert refused.value.param == param


def test_both_shapes_are_the_same_to_a_template() -> None:
    dialect = Dialect.of(TEMPLATE)
    found = [
        read_tools(Fields({"tools": TOOLS}), dialect),
        read_tools(Fields({"tools": FLAT}), dialect, is_flat=True),
        read_anthropic_tools(Fields({"tools": ANTHROPICS}), dialect),
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].offered == TOOLS
    serial = Fields({"tools": ANTHROPICS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert read_anthropic_tools(serial, dialect).most_calls == 1
    assert serial.found == []


CHANNELS = "{% if tools %}<|channel|>analysis<|message|>{% endif %}{{ 'tool' }}{{ m.tool_calls }}{{ m.thinking }}"
IN_CHANNELS = (
    "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


async def test_an_answer_in_channels() -> None:
    async with front_of(IN_CHANNELS, CHANNELS) as front, front.openai() as client:
        ask = functools.partial(client.chat.completions.create, model="tiny", messages=HI, max_tokens=MOST)
        answer: Any = await ask(tools=TOOLS)
        chunks: Any = [chunk async for chunk in await ask(tools=TOOLS, stream=True)]
        untold: Any = await ask()
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "Where?")
    assert [each.function.arguments for each in message.tool_calls] == ['{"city": "Paris"}']
    assert answer.choices[0].finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(each.function.arguments for d in deltas for each in d.tool_calls or ()) == '{"city": "Paris"}'
    message = untold.choices[0].message
    assert (message.content, message.reasoning_content) == (IN_CHANNELS.partition("<|end|>")[2], "Where?")


async def test_a_conversation_reaches_a_template_of_channels() -> None:
    """It takes one call a message, and reasoning or a text beside it."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said: Any = {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "Where?"}
    told = {"tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "Paris"}}}]}
    async with front_of("ok", CHANNELS) as front, front.openai() as client:
        ask = functools.partial(client.chat.completions.create, model="tiny", max_tokens=4)
        await ask(messages=[*HI, said])
        assert (
            prompt_of(front)
            == f"user: hi\nassistant: {json.dumps({**told, 'thinking': 'Where?' + chr(10) * 2 + 'I look.'})}\n"
        )
        with pytest.raises(openai.BadRequestError, match="several calls in one message"):
            await ask(messages=[*HI, {**said, "tool_calls": [call, {**call, "id": "c2"}]}])


@pytest.mark.parametrize(
    ("template", "effort", "line"),
    [
        ("{{ reasoning_effort }}", "low", "reasoning_effort: low\n"),
        ("{{ enable_thinking }}", "low", "enable_thinking: True\n"),
        ("{{ enable_thinking }}", "none", "enable_thinking: False\n"),
        ("{{ messages }}", "none", ""),
        ("{{ messages }}", "low", None),
        ("{{ reasoning_effort }}", "much", None),
    ],
)
async def test_an_effort_is_what_the_template_reads(template: str, effort: Any, line: str | None) -> None:
    async with front_of("ok", template) as front, front.openai() as client:
        chat = functools.partial(client.chat.completions.create, model="tiny", messages=HI, max_tokens=4)
        respond = functools.partial(client.responses.create, model="tiny", input="hi", max_output_tokens=4)
        if line is None:
            with pytest.raises(openai.BadRequestError, match=r"reasoning_effort: (is not supported|must be one of)"):
                await chat(reasoning_effort=effort)
            with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort: (is not supported|must be one of)"):
                await respond(reasoning={"effort": effort})
            return
        await chat(reasoning_effort=effort)
        answer = await respond(reasoning={"effort": effort})
        assert answer.reasoning is not None
        assert answer.reasoning.effort == effort
        executed = [request for worker in front.cluster.workers for request in worker.executed]
        prompts = {bytes(token_id - 3 for token_id in each.prompt_token_ids).decode() for each in executed}
        assert prompts == {f"{line}user: hi\n"}
