"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from manylora_shared.errors import ManyloraError, shown
from manylora_shared.metadata import ADAPTER_KEY

from manylora_router.dialect.blocks import Block, Kind
from manylora_router.dialect.dialect import Dialect
from manylora_router.front.http import errors
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door, resumed_part
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.prompts import Conversation, each_of, is_too_long, read_message, read_text
from manylora_router.front.http.api.telling import Told, event, tell
from manylora_router.front.http.api.tooling import Reading, Tools, read_anthropic_tools
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_STOP_STRINGS, ChatPrompt, RequestInput

# where OpenAI's are not Anthropic's as well
_TYPES = {"server_error": "api_error", "conflict_error": "invalid_request_error", "cancelled_error": "api_error"}
_TOO_LARGE = 413
NOT_BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("container", ()),
    ("mcp_servers", ([],)),
    ("output_config", ({},)),
)
_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
_NO_USAGE = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}
HARMLESS = ("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")


class AnthropicErrors(errors.ErrorForm):
    def document(self, error: ManyloraError, names: errors.Names) -> dict[str, Any]:
        status, kind = error.http
        kind = "request_too_large" if status == _TOO_LARGE else _TYPES.get(kind, kind)
        message = super().document(error, names)["error"]["message"]
        return {"type": "error", "error": {"type": kind, "message": message}}

    def event(self, error: ManyloraError, names: errors.Names) -> bytes:
        return event(self.document(error, names))


async def create(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    request, form, reading = _read(fields, exchange, door)
    await tell(door, exchange, request, _Message(form.model, reading), reading, is_stream=form.is_stream)


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form, Reading]:
    """Raises InvalidRequest."""
    prompt, tools = _prompt(fields, door.dialect)
    reading = Reading(door.dialect, tools, door.text, exchange.request_id)
    max_tokens = fields.integer("max_tokens", at_least=1)
    if max_tokens is None:
        fields.wrong("max_tokens", "is missing")
    stops = fields.texts("stop_sequences", most=MAX_STOP_STRINGS)
    if stops and fields.peek("stop"):
        fields.wrong("stop", "is given under two names: stop and stop_sequences")
    request, form = asked.read(
        fields, asked.caller_of(exchange.headers), door.names, max_tokens=max_tokens, top_logprobs=None
    )
    asked.refuse_untold(fields)
    fields.close()
    exchange.names = {**form.names, **reading.names, **({"stop": "stop_sequences"} if stops else {})}
    fields.check()
    return reading.asked(replace(request, stop=stops or request.stop), prompt), form, reading


async def count_tokens(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    door = await door.at(exchange, fields)
    prompt, _ = _prompt(fields, door.dialect)
    model = fields.text("model")
    fields.close()
    exchange.names = {ADAPTER_KEY: "model"}
    fields.check()
    request = replace(asked.nameless(asked.caller_of(exchange.headers), model, door.names), prompt=prompt)
    tokens, _ = await door.intake.tokenize(request)
    await exchange.answer({"input_tokens": len(tokens)})


def _prompt(fields: Fields, dialect: Dialect) -> tuple[ChatPrompt, Tools]:
    found = Conversation()
    if system := read_text(fields, "system"):
        found.say("system", system)
    for message in each_of(fields, "messages"):
        _read_message(message, found)
    found.fit(fields, "messages", dialect)
    tools = read_anthropic_tools(fields, dialect)
    kwargs = _thinking(fields, dialect)
    for name, neutral in NOT_BUILT:
        fields.only(name, *neutral)
    fields.ignore(*HARMLESS)
    last = len(found.messages) - 1
    # a beginning of the answer
    goes_on = last >= 0 and found.messages[last][0] == "assistant" and "tool_calls" not in found.more.get(last, {})
    return found.prompt(tools=tools.offered, continue_final_message=goes_on, template_kwargs=kwargs), tools


def _thinking(fields: Fields, dialect: Dialect) -> dict[str, Any]:
    """As a variable of templates that know it. How much is thought, nobody bounds."""
    thinking = fields.inner("thinking")
    kind = thinking.text("type", "disabled")
    thinking.ignore("budget_tokens", "display")
    thinking.close()
    if kind not in ("enabled", "adaptive", "disabled"):
        thinking.wrong("type", "must be enabled, adaptive or disabled")
    if "enable_thinking" in dialect.words and fields.peek("thinking") is not None:
        return {"enable_thinking": kind != "disabled"}
    if kind != "disabled" and dialect.thinking is None:
        thinking.wrong("type", "is not supported: the model's chat template knows no reasoning")
    return {}


def _read_message(message: Fields, found: Conversation) -> None:
    """One of Anthropic's may be several of a template's: results of tools stand before what the user says."""
    if not isinstance(parts := message.peek("content"), list):
        read_message(message, found)
        return
    role = message.text("role")
    message.ignore("content")
    if role not in ("user", "assistant", "system"):
        message.wrong("role", "must be user or assistant")
    texts, thoughts, calls = list[str](), list[str](), list[tuple[str, str, dict[str, Any]]]()
    for index, given in enumerate(parts if not is_too_long(message, "content", parts) else ()):
        if not isinstance(given, dict):
            message.wrong(f"content[{index}]", "must be an object with a type")
            break
        part = Fields(given, f"{message.path}content[{index}].", message.found)
        part.ignore("cache_control", "citations")
        match (kind := part.text("type"), role):
            case "text", _:
                texts.append(part.text("text"))
            case "thinking", "assistant":
                thoughts.append(part.text("thinking"))
                part.ignore("signature")
            case "redacted_thinking", "assistant":
                part.ignore("data")
            case "tool_use", "assistant":
                part.ignore("caller")
                calls.append((part.text("id"), part.text("name"), part.members_of("input")))
            case "tool_result", "user":
                part.flag("is_error")
                found.result(part.text("tool_use_id"), read_text(part, "content"))
            case _:
                part.wrong("type", f"{shown(kind)} is none that is read here")
                break
        part.close()
    message.close()
    if texts or thoughts or calls or role != "user":
        found.say(role, "\n".join(texts), reasoning="\n".join(thoughts))
    for call in calls:
        found.call(*call)


class _Message:
    """api.telling.Telling."""

    def __init__(self, model: str, reading: Reading) -> None:
        self._model = model
        self._reading = reading
        self._id = f"msg_{reading.request_id}"

    def begin(self, told: Told) -> bytes:
        usage = {"input_tokens": told.prompt_tokens, "output_tokens": 0}
        message = {**self.whole(told), "content": [], "stop_reason": None, "usage": usage}
        return event({"type": "message_start", "message": message})

    def open(self, index: int, block: Block) -> bytes:
        empty = self._block(Block(block.kind, name=block.name, number=block.number))
        return event({"type": "content_block_start", "index": index, "content_block": empty})

    def delta(self, index: int, block: Block, text: str) -> bytes:
        name, member = _DELTAS[block.kind]
        return event({"type": "content_block_delta", "index": index, "delta": {"type": name, member: text}})

    def close(self, index: int, block: Block) -> bytes:
        return event({"type": "content_block_stop", "index": index})

    def end(self, told: Told) -> bytes:
        whole = self.whole(told)
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        return event({"type": "message_delta", "delta": delta, "usage": whole["usage"]}) + event(
            {"type": "message_stop"}
        )

    def whole(self, told: Told) -> dict[str, Any]:
        usage = told.usage
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._block(block) for block in told.blocks.all] or [self._block(Block(Kind.TEXT))],
            "container": None,
            "stop_details": None,
            "stop_reason": _stop_reason(told),
            "stop_sequence": told.end.stop_string,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_prompt_tokens,
                "output_tokens": usage.completion_tokens,
                **_NO_USAGE,
                **resumed_part(usage.resumed),
            },
        }

    def _block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case Kind.TEXT:
                return {"type": "text", "text": block.text, "citations": None}
            case Kind.REASONING:
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case Kind.CALL:
                given = json.loads(block.text) if block.is_whole else {}
                call_id = self._reading.call_id(0, block.number)
                return {"type": "tool_use", "id": call_id, "name": block.name, "input": given, "caller": None}


def _stop_reason(told: Told) -> str:
    if told.end.stop_string is not None:
        return "stop_sequence"
    if told.is_cut:
        return "max_tokens"
    return "tool_use" if told.blocks.has_whole_calls else "end_turn"
