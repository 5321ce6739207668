"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manylora_shared.errors import ManyloraError
from manylora_shared.metadata import ADAPTER_KEY

from manylora_router.front.http import errors
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.prompts import read_messages, read_text
from manylora_router.front.http.api.telling import Told, event, tell
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import MAX_STOP_STRINGS, ChatPrompt, RequestInput

# where OpenAI's are not Anthropic's as well
_TYPES = {"server_error": "api_error", "conflict_error": "invalid_request_error", "cancelled_error": "api_error"}
_TOO_LARGE = 413
_NOT_BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("tools", ([],)),
    ("tool_choice", ({"type": "auto"}, {"type": "none"})),
    ("thinking", ({"type": "disabled"},)),
    ("container", ()),
    ("mcp_servers", ([],)),
    ("output_config", ({},)),
)
_NO_USAGE = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}
_HARMLESS = ("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")


class AnthropicErrors(errors.ErrorForm):
    def document(self, error: ManyloraError, names: errors.Names) -> dict[str, Any]:
        status, kind = error.http
        kind = "request_too_large" if status == _TOO_LARGE else _TYPES.get(kind, kind)
        message = super().document(error, names)["error"]["message"]
        return {"type": "error", "error": {"type": kind, "message": message}}

    def event(self, error: ManyloraError, names: errors.Names) -> bytes:
        return event(self.document(error, names))


async def create(exchange: Exchange, door: Door) -> None:
    request, form = _read(await door.read(exchange), exchange, door)
    await tell(door, exchange, request, _Message(form.model, exchange.request_id), is_stream=form.is_stream)


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form]:
    """Raises InvalidRequest."""
    prompt = _prompt(fields)
    max_tokens = fields.integer("max_tokens", at_least=1)
    if max_tokens is None:
        fields.wrong("max_tokens", "is missing")
    stops = fields.texts("stop_sequences", most=MAX_STOP_STRINGS)
    request, form = asked.read(
        fields, asked.caller_of(exchange.headers), door.intake.base_model, max_tokens=max_tokens, top_logprobs=None
    )
    fields.close()
    exchange.names = {**form.names, "stop": "stop_sequences"}
    fields.check()
    return replace(request, prompt=prompt, stop=stops, n=1, request_id=exchange.request_id), form


async def count_tokens(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    prompt = _prompt(fields)
    fields.text("model")
    fields.close()
    exchange.names = {ADAPTER_KEY: "model"}
    fields.check()
    request = replace(asked.nameless(asked.caller_of(exchange.headers)), prompt=prompt)
    tokens, _ = await door.intake.tokenize(request)
    await exchange.answer({"input_tokens": len(tokens)})


def _prompt(fields: Fields) -> ChatPrompt:
    system = read_text(fields, "system")
    messages = read_messages(fields)
    for name, neutral in _NOT_BUILT:
        fields.only(name, *neutral)
    fields.ignore(*_HARMLESS)
    goes_on = bool(messages) and messages[-1][0] == "assistant"  # a beginning of the answer
    return ChatPrompt([("system", system), *messages] if system else messages, continue_final_message=goes_on)


class _Message:
    """api.telling.Telling."""

    def __init__(self, model: str, request_id: str) -> None:
        self._model = model
        self._id = f"msg_{request_id}"

    def begin(self, told: Told) -> bytes:
        usage = {"input_tokens": told.prompt_tokens, "output_tokens": 0}
        message = {**self.whole(told), "content": [], "stop_reason": None, "usage": usage}
        block = {"type": "text", "text": ""}
        return event({"type": "message_start", "message": message}) + event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def text(self, text: str) -> bytes:
        return event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def end(self, told: Told) -> bytes:
        whole = self.whole(told)
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        return b"".join(
            [
                event({"type": "content_block_stop", "index": 0}),
                event({"type": "message_delta", "delta": delta, "usage": whole["usage"]}),
                event({"type": "message_stop"}),
            ]
        )

    def whole(self, told: Told) -> dict[str, Any]:
        stop, usage = told.end.stop_string, told.usage
        reason = "stop_sequence" if stop is not None else "max_tokens" if told.is_cut else "end_turn"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [{"type": "text", "text": told.text, "citations": None}],
            "container": None,
            "stop_details": None,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_prompt_tokens,
                "output_tokens": usage.completion_tokens,
                **_NO_USAGE,
            },
        }
