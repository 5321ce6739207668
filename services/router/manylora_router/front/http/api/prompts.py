"""Messages of a conversation, in the shapes that the endpoints have for them, to the router's prompt."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_CHAT_MESSAGES, ChatPrompt

_ROLES = {"developer": "system"}  # what OpenAI calls it now; templates know the older word
_NO_TOOL_CALLS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("tool_calls", ([],)),
    ("tool_call_id", ()),
    ("function_call", ()),
    ("audio", ()),
)
# of a message: of no meaning to a model
_IGNORED = ("name", "refusal", "annotations", "reasoning", "reasoning_content")


def read_messages(
    fields: Fields, name: str = "messages", *, kinds: Collection[str] = ("text",), ignored: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Roles and texts. What is wrong is gathered in `fields`.

    Args:
        kinds: types of parts that are texts.
        ignored: further members of a message.
    """
    given = fields.raw(name)
    if not isinstance(given, list) or not given:
        fields.wrong(name, "must be a list of at least one message")
        return []
    found = []
    for index, each in enumerate(itertools.islice(given, MAX_CHAT_MESSAGES + 1)):
        path = f"{name}[{index}]"
        if not isinstance(each, dict):
            fields.wrong(path, "must be an object with role and content")
            break
        message = Fields(each, f"{path}.", fields.found)
        message.ignore(*_IGNORED, *ignored)
        found.append((_role(message), read_text(message, "content", kinds)))
        for member, neutral in _NO_TOOL_CALLS:
            message.only(member, *neutral)
        message.close()
    return found


def chat_prompt(fields: Fields) -> ChatPrompt:
    """With what a template can be told besides."""
    opens = fields.peek("add_generation_prompt")
    return ChatPrompt(
        read_messages(fields),
        continue_final_message=fields.flag("continue_final_message"),
        add_generation_prompt=fields.flag("add_generation_prompt") if opens is not None else None,
        template_kwargs=fields.members_of("chat_template_kwargs"),
    )


def read_text(fields: Fields, name: str, kinds: Collection[str] = ("text",)) -> str:
    """A text, or a list of parts that are: those by lines."""
    value = fields.peek(name)
    if not isinstance(value, list):
        return fields.text(name)
    fields.ignore(name)
    texts: list[str] = []
    for index, part in enumerate(itertools.islice(value, MAX_CHAT_MESSAGES)):
        path = f"{name}[{index}]"
        if not isinstance(part, dict) or part.get("type") not in kinds:
            fields.wrong(path, f"must be a part of type {' or '.join(kinds)}: this model takes no other")
            break
        inner = Fields(part, f"{fields.path}{path}.", fields.found)
        inner.ignore("type", "cache_control", "citations", "annotations", "logprobs")
        texts.append(inner.text("text"))
        inner.close()
    return "\n".join(texts)


def _role(message: Fields) -> str:
    role = message.text("role")
    if not role:
        message.wrong("role", "is missing")
    return _ROLES.get(role, role)
