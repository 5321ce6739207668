"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Answering, Choice, Door, Opened
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.logprobs import Logprobs
from manylora_router.front.http.api.prompts import chat_prompt
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import RequestInput

_NEUTRAL_TOOLS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("tools", ([],)),
    ("functions", ([],)),
    ("tool_choice", ("none", "auto")),
    ("function_call", ("none", "auto")),
    ("modalities", (["text"],)),
    ("audio", ()),
    ("prediction", ()),
    ("web_search_options", ()),
    ("moderation", ()),
    ("documents", ([],)),
    ("chat_template", ()),
    ("add_special_tokens", (False,)),
    ("echo", (False,)),
)


async def chat(exchange: Exchange, door: Door) -> None:
    request, form = _read(await door.read(exchange), exchange, door)
    await Answering(door, exchange, [request], form, ChatShape(form, Logprobs(door.text, form))).run()


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form]:
    """Raises InvalidRequest."""
    max_tokens = fields.integer("max_completion_tokens", at_least=1)
    older = fields.integer("max_tokens", at_least=1)
    request, form = asked.read(
        fields,
        asked.caller_of(exchange.headers),
        door.intake.base_model,
        max_tokens=max_tokens if max_tokens is not None else older,
        top_logprobs=_top_logprobs(fields),
    )
    form = replace(form, prompt_logprobs=asked.read_prompt_logprobs(fields, form))
    prompt = chat_prompt(fields)
    for name, neutral in _NEUTRAL_TOOLS:
        fields.only(name, *neutral)
    fields.close()
    exchange.names = {**form.names, **({"max_tokens": "max_completion_tokens"} if max_tokens is not None else {})}
    fields.check()
    sampling = replace(request.sampling, prompt_logprobs=form.prompt_logprobs)
    return replace(request, prompt=prompt, sampling=sampling, request_id=exchange.request_id), form


def _top_logprobs(fields: Fields) -> int | None:
    wants, count = fields.flag("logprobs"), asked.read_logprobs_count(fields, "top_logprobs")
    if count and not wants:
        fields.wrong("top_logprobs", "needs logprobs: true")
    return (count or 0) if wants else None


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_name = "chat.completion"
    event_name = "chat.completion.chunk"

    def __init__(self, form: Form, logprobs: Logprobs) -> None:
        self._form = form
        self._logprobs = logprobs

    def offset(self, index: int) -> int:
        return 0

    def document(self, prompt: Opened) -> dict[str, Any]:
        told: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)} if self._form.has_token_ids else {}
        if self._form.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._logprobs.of_prompt(prompt)
        return told

    def choice(self, index: int, choice: Choice, prompt: Opened) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
        return {"index": index, "message": message, **self._more(choice)}

    def piece(self, index: int, piece: Choice) -> dict[str, Any]:
        is_end = piece.finish_reason is not None and not piece.text
        return {"index": index, "delta": {} if is_end else {"content": piece.text}, **self._more(piece)}

    def opening(self, index: int, prompt: Opened) -> dict[str, Any] | None:
        return {**self.piece(index, Choice()), "delta": {"role": "assistant", "content": ""}}

    def _more(self, piece: Choice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "logprobs": self._logprobs.of_chat(piece) if self._form.has_logprobs and piece.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._form.has_token_ids:
            told["token_ids"] = list(piece.token_ids)
        return told
