"""Tools and typed answers by OpenAI's and Anthropic's own clients, from the real model."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from anthropic.types import Message
from conftest import CALLS, Served
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, Field

from tests.real_model import CAPITAL, TOOLS

pytestmark = pytest.mark.clients

MESSAGES: Any = CAPITAL
MODEL = "smollm2"
MOST = 160


class Weather(BaseModel):
    """The weather of the next days."""

    city: str = Field(max_length=24)
    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=14)


class Country(BaseModel):
    name: str = Field(max_length=24)
    capital: str = Field(max_length=24)
    is_large: bool
    neighbours: list[str] = Field(max_length=2)


TYPED: Any = [openai.pydantic_function_tool(model) for model in (Weather, Country)]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TYPED}
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TYPED]
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}
CHOICES: list[tuple[dict[str, Any], set[str]]] = [
    ({"tool_choice": "required"}, {"Weather", "Country"}),
    ({"tool_choice": "required", "parallel_tool_calls": False}, {"Weather", "Country"}),
    ({"tool_choice": NAMED}, {"Weather"}),
]


def sync(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


def check(name: str, arguments: str, names: set[str]) -> None:
    assert name in names
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_the_model_calls_where_it_may(served: Served) -> None:
    asked: dict[str, Any] = {"model": CALLS, "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    with sync(served) as client:
        whole: Any = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            streamed: Any = stream.get_final_completion()
        for choice in (whole.choices[0], streamed.choices[0]):
            [call] = choice.message.tool_calls
            assert (call.function.name, call.function.arguments) == ("capital", '{"of": "France"}')
            assert choice.finish_reason == "tool_calls"
        told = [
            *MESSAGES,
            whole.choices[0].message.model_dump(include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "Paris"},
        ]
        after: Any = client.chat.completions.create(
            **{**asked, "model": MODEL, "messages": told, "tool_choice": "none"}
        )
        assert after.choices[0].message.content


def test_strict_tools_are_called_as_their_schemas_say(served: Served) -> None:
    """By a model that may call, and that is so hot that it hardly knows what it has learnt."""
    function = TOOLS[0]["function"]
    strict: Any = [{"type": "function", "function": {**function, "strict": True}}]
    schema = {**function["parameters"], "additionalProperties": False}
    asked: dict[str, Any] = {"model": CALLS, "messages": MESSAGES, "max_tokens": 60}
    with sync(served) as client:
        cold: Any = client.chat.completions.create(**asked, tools=strict, temperature=0)
        [call] = cold.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("capital", '{"of": "France"}')
        hot: Any = client.chat.completions.create(**asked, tools=strict, temperature=1.8, n=8, seed=5)
    calls = [call for choice in hot.choices for call in choice.message.tool_calls or ()]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), schema)
    for choice in hot.choices:
        assert "<tool_call>" not in (choice.message.content or "") or choice.finish_reason == "length"


@pytest.mark.parametrize(("choice", "names"), CHOICES)
def test_calls_that_must_be(served: Served, choice: dict[str, Any], names: set[str]) -> None:
    """At temperature 1, from a model that never learned to call."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TYPED, "max_tokens": MOST, "seed": 7}
    is_one = "parallel_tool_calls" in choice or choice["tool_choice"] != "required"
    with sync(served) as client:
        raw = client.chat.completions.with_raw_response.create(**asked, **choice, n=2)
        whole = ChatCompletion.model_validate_json(raw.content, strict=True)
        stream = client.chat.completions.with_raw_response.create(**asked, **choice, n=2, stream=True)
        lines = [line.removeprefix("data: ") for line in stream.http_response.iter_lines() if line.startswith("data")]
    entries: list[Any] = []
    for line in lines[:-1]:
        for each in ChatCompletionChunk.model_validate_json(line, strict=True).choices:
            entries += [(each.index, entry) for entry in each.delta.tool_calls or ()]
    for answer in whole.choices:
        calls: Any = answer.message.tool_calls
        assert calls
        assert len(calls) == 1 or not is_one
        if is_one:
            assert answer.finish_reason == ("stop" if choice["tool_choice"] is NAMED else "tool_calls")
        for number, call in enumerate(calls):
            check(call.function.name, call.function.arguments, names)
            same = [entry for index, entry in entries if (index, entry.index) == (answer.index, number)]
            assert (same[0].id is None, same[0].function.name) == (False, call.function.name)
            assert "".join(entry.function.arguments or "" for entry in same) == call.function.arguments


def test_calls_are_parsed_to_models(served: Served) -> None:
    with sync(served) as client:
        answer: Any = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=TYPED, tool_choice=NAMED, max_tokens=MOST, temperature=0
        )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_are_parsed_to_models(served: Served, temperature: int) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": temperature, "max_tokens": MOST}
    with sync(served) as client:
        whole = client.chat.completions.parse(**asked, response_format=Country, seed=3)
        with client.chat.completions.stream(**asked, response_format=Country, seed=3) as stream:
            streamed = stream.get_final_completion()
        parsed = client.responses.parse(
            model=MODEL,
            input=MESSAGES,
            text_format=Country,
            max_output_tokens=MOST,
            store=False,
            temperature=temperature,
        )
    assert isinstance(whole.choices[0].message.parsed, Country)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert isinstance(parsed.output_parsed, Country)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
def test_responses(served: Served, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "input": MESSAGES, "tools": FLAT, "tool_choice": choice, "max_output_tokens": MOST,
        "parallel_tool_calls": False, "store": False,
    }  # fmt: skip
    with sync(served) as client:
        raw = client.responses.with_raw_response.create(**asked)
        whole = Response.model_validate_json(raw.content, strict=True)
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
    for answer in (whole, streamed):
        [item] = answer.output
        assert item.type == "function_call"
        check(item.name, item.arguments, {"Weather"} if choice != "required" else {"Weather", "Country"})


ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("choice", "names"), [(ANY, {"Weather", "Country"}), ({"type": "tool", "name": "Weather"}, {"Weather"})]
)
def test_anthropics(served: Served, choice: Any, names: set[str]) -> None:
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": MOST,
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0) as client:
        raw = client.messages.with_raw_response.create(**asked)
        whole = Message.model_validate_json(raw.http_response.read(), strict=True)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for answer in (whole, streamed):
            [part] = answer.content
            assert (part.type, answer.stop_reason) == ("tool_use", "tool_use")
            check(part.name, json.dumps(part.input), names)
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "sunny"}  # type: ignore[union-attr]
        told = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        after = client.messages.create(**{**asked, "messages": told, "tool_choice": {"type": "none"}})
        assert after.content[0].type == "text"
