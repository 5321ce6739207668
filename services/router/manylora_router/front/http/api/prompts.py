"""Messages of a conversation, in the shapes that the endpoints have for them, to the router's prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from manylora_router.dialect.dialect import Dialect
from manylora_router.front.http.api.tooling import Tools, read_calls
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_CHAT_MESSAGES, ChatPrompt

EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCH = "enable_thinking"
_ROLES = {"developer": "system"}  # what OpenAI calls it now; templates know the older word
# of a message: of no meaning to a model
_IGNORED = ("refusal", "annotations")


class Conversation:
    """Messages as templates take them, one after the other."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []
        self.more: dict[int, dict[str, Any]] = {}
        self._names: dict[str, str] = {}  # of calls, by their ids

    def say(self, role: str, text: str, *, reasoning: str = "", name: str = "") -> None:
        self.messages.append((role, text))
        if reasoning:
            self._tell(reasoning_content=reasoning)
        if name:
            self._tell(name=name)

    def think(self, reasoning: str) -> None:
        """Of the last message, which is the assistant's."""
        earlier = self.more.get(len(self.messages) - 1, {}).get("reasoning_content", "")
        self._tell(reasoning_content=f"{earlier}\n{reasoning}" if earlier else reasoning)

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Of the last message, which is the assistant's."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        earlier = self.more.get(len(self.messages) - 1, {}).get("tool_calls", [])
        self._tell(tool_calls=[*earlier, call])

    def result(self, call_id: str, text: str, name: str = "") -> None:
        self.messages.append(("tool", text))
        self._tell(tool_call_id=call_id)
        if name := name or self._names.get(call_id, ""):
            self._tell(name=name)

    def _tell(self, **members: Any) -> None:
        self.more.setdefault(len(self.messages) - 1, {}).update(members)

    def fit(self, fields: Fields, name: str, dialect: Dialect) -> None:
        """To the template, which must read all of it."""
        if any(role == "tool" for role, _ in self.messages) and "tool" not in dialect.words:
            fields.wrong(name, "has results of tools, which the model's chat template does not take")
        if any("tool_calls" in more for more in self.more.values()) and "tool_calls" not in dialect.words:
            fields.wrong(name, "has calls of tools, which the model's chat template does not take")
        if dialect.has_channels:
            if any(len(more.get("tool_calls", ())) > 1 for more in self.more.values()):
                fields.wrong(
                    name, "has several calls in one message, of which this model's chat template reads the first"
                )
            self._think()

    def _think(self) -> None:
        """For templates of gpt-oss: reasoning is `thinking`, and a message with a call has it or a text, not both."""
        for index, more in self.more.items():
            if "reasoning_content" not in more:
                continue
            role, text = self.messages[index]
            thinking = more.pop("reasoning_content")
            if text and "tool_calls" in more:
                thinking, self.messages[index] = f"{thinking}\n\n{text}", (role, "")
            more["thinking"] = thinking

    def prompt(self, **more: Any) -> ChatPrompt:
        return ChatPrompt(self.messages, more=self.more, **more)


def read_messages(fields: Fields, dialect: Dialect) -> Conversation:
    """OpenAI's. What is wrong is gathered in `fields`."""
    found = Conversation()
    for message in each_of(fields, "messages"):
        message.ignore(*_IGNORED)
        read_message(message, found)
    found.fit(fields, "messages", dialect)
    return found


def read_message(
    message: Fields, found: Conversation, kinds: Collection[str] = ("text",), *, thoughts: str = ""
) -> None:
    """`kinds`: types of parts that are texts. thoughts: the assistant's, from elsewhere."""
    has_text = message.peek("content") not in (None, [])
    role, text = _role(message), read_text(message, "content", kinds)
    if not has_text and role in ("system", "user", "tool"):
        message.wrong("content", "is missing: a text, or a list of parts")
    name, call_id = message.text("name"), message.text("tool_call_id")
    reasoning = message.text("reasoning_content") or message.text("reasoning") or thoughts
    if role == "tool":
        found.result(call_id, text, name)
    else:
        found.say(role, text, reasoning=reasoning if role == "assistant" else "", name=name)
    if call_id and role != "tool":
        message.wrong("tool_call_id", "is of the role tool alone")
    calls = read_calls(message)
    if calls and role != "assistant":
        message.wrong("tool_calls", "are the assistant's alone")
    for call in calls:
        found.call(*call)
    message.only("function_call")
    message.only("audio")
    message.close()


def each_of(fields: Fields, name: str) -> Iterator[Fields]:
    """The objects of a list with at least one."""
    given = fields.raw(name)
    if not isinstance(given, list) or not given:
        fields.wrong(name, "must be a list of at least one message")
        return
    if is_too_long(fields, name, given):
        return
    for index, each in enumerate(given):
        path = f"{name}[{index}]"
        if not isinstance(each, dict):
            fields.wrong(path, "must be an object with role and content")
            return
        yield Fields(each, f"{fields.path}{path}.", fields.found)


def chat_prompt(fields: Fields, dialect: Dialect, tools: Tools) -> ChatPrompt:
    """With what a template can be told besides."""
    opens = fields.peek("add_generation_prompt")
    return read_messages(fields, dialect).prompt(
        tools=tools.offered,
        continue_final_message=fields.flag("continue_final_message"),
        add_generation_prompt=fields.flag("add_generation_prompt") if opens is not None else None,
        template_kwargs=fields.members_of("chat_template_kwargs"),
    )


def read_effort(fields: Fields, name: str, dialect: Dialect) -> dict[str, Any]:
    """How much is to be thought, as a variable of the model's chat template."""
    effort = fields.text(name)
    if not effort:
        return {}
    if effort not in EFFORTS:
        fields.wrong(name, f"must be one of {', '.join(EFFORTS)}")
    elif EFFORT in dialect.words:
        return {EFFORT: effort}
    elif _SWITCH in dialect.words:
        return {_SWITCH: effort != "none"}
    elif effort != "none":
        fields.wrong(name, "is not supported, except as none: the model's chat template knows no reasoning")
    return {}


def read_text(fields: Fields, name: str, kinds: Collection[str] = ("text",)) -> str:
    """A text, or a list of parts that are: those by lines."""
    value = fields.peek(name)
    if not isinstance(value, list):
        return fields.text(name)
    fields.ignore(name)
    texts: list[str] = []
    for index, part in enumerate(value if not is_too_long(fields, name, value) else ()):
        path = f"{name}[{index}]"
        if not isinstance(part, dict) or part.get("type") not in kinds:
            fields.wrong(path, f"must be a part of type {' or '.join(kinds)}: this model takes no other")
            break
        inner = Fields(part, f"{fields.path}{path}.", fields.found)
        inner.ignore("type", "cache_control", "citations", "annotations", "logprobs")
        texts.append(inner.text("text"))
        inner.close()
    return "\n".join(texts)


def is_too_long(fields: Fields, name: str, given: Sequence[object]) -> bool:
    """And says so."""
    if len(given) > MAX_CHAT_MESSAGES:
        fields.wrong(name, f"has {len(given)} entries; at most {MAX_CHAT_MESSAGES} are read")
    return len(given) > MAX_CHAT_MESSAGES


def _role(message: Fields) -> str:
    role = message.text("role")
    if not role:
        message.wrong("role", "is missing")
    return _ROLES.get(role, role)
