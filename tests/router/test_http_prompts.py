"""Messages of a conversation, right and wrong."""

from __future__ import annotations

import pytest
from manylora_router.dialect.dialect import Dialect
from manylora_router.front.http.api.prompts import chat_prompt, read_messages
from manylora_router.front.http.api.tooling import Tools
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_CHAT_MESSAGES

TAKES_ALL = Dialect(words=frozenset({"tools", "tool", "tool_calls"}))


def read(*messages: object) -> tuple[list[tuple[str, str]], list[str]]:
    fields = Fields({"messages": list(messages)})
    return read_messages(fields, TAKES_ALL).messages, [f"{v.field}: {v.description}" for v in fields.found]


def test_messages_of_every_kind() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
    ]
    assert read(*given) == ([("system", "s"), ("user", "a\nb"), ("assistant", "")], [])
    assert read_messages(Fields({"messages": given}), TAKES_ALL).more == {1: {"name": "Ann"}}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hi", "messages[0]: must be an object"),
        ({"role": "user"}, "messages[0].content: is missing"),
        ({"role": "system", "content": None}, "messages[0].content: is missing"),
        ({"role": "user", "content": []}, "messages[0].content: is missing"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content: is missing"),
        ({"content": "x"}, "messages[0].role: is missing"),
        ({"role": "user", "content": 7}, "messages[0].content: must be a string"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content: has half of a surrogate pair"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]: must be a part of type text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text: must be a string"),
        ({"role": "user", "content": "x", "mood": 1}, "messages[0].mood: is not known here"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call: is not supported"),
    ],
)
def test_wrong_messages_are_named(message: object, problem: str) -> None:
    _, problems = read(message)
    assert any(each.startswith(problem) for each in problems), problems


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "x"}] * (MAX_CHAT_MESSAGES + 1), "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_CHAT_MESSAGES + 1)}],
            "messages[0].content",
        ),
    ],
)
def test_what_is_too_long_is_refused_and_not_cut(messages: list[object], field: str) -> None:
    _, problems = read(*messages)
    assert problems == [f"{field}: has {MAX_CHAT_MESSAGES + 1} entries; at most {MAX_CHAT_MESSAGES} are read"]


def test_what_a_template_is_told_besides() -> None:
    messages = [{"role": "user", "content": "x"}]
    told = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"a": [1]}}
    fields = Fields({"messages": messages, **told})
    prompt = chat_prompt(fields, TAKES_ALL, Tools())
    fields.close()
    assert fields.found == []
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert prompt.template_kwargs == {"a": [1]}
    assert chat_prompt(Fields({"messages": messages}), TAKES_ALL, Tools()).add_generation_prompt is None
    wrong = Fields({"messages": messages, "chat_template_kwargs": {"\ud800": 1}})
    chat_prompt(wrong, TAKES_ALL, Tools())
    assert [each.field for each in wrong.found] == ["chat_template_kwargs"]
