"""POST /v1/responses, without a store: each request brings its whole conversation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from manylora_shared.errors import ManyloraError

from manylora_router.front.http import errors
from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.prompts import read_messages
from manylora_router.front.http.api.telling import Told, event, tell
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import ChatPrompt, RequestInput

_NOT_BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("previous_response_id", ()),
    ("conversation", ()),
    ("background", (False,)),
    ("prompt", ()),
    ("tools", ([],)),
    ("tool_choice", ("auto", "none")),
    ("include", ([],)),
    ("reasoning", ({}, {"effort": None}, {"effort": "none"})),
    ("top_logprobs", (0,)),
    ("truncation", ("disabled",)),
    ("context_management", ([],)),
    ("moderation", ()),
)
# of every response
_UNSAID: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
_HARMLESS = ("max_tool_calls", "access_programs", "background_options", "image")
_BEGUN: dict[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
_KINDS = ("input_text", "output_text", "text")


class _Errors(errors.ErrorForm):
    """An error in mid-stream is an event with a number."""

    def __init__(self, numbers: itertools.count[int]) -> None:
        self._numbers = numbers

    def event(self, error: ManyloraError, names: errors.Names) -> bytes:
        told = self.document(error, names)["error"]
        more = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return event({"type": "error", "sequence_number": next(self._numbers), **more})


async def respond(exchange: Exchange, door: Door) -> None:
    request, form, said = _read(await door.read(exchange), exchange, door)
    numbers = itertools.count()
    exchange.form = _Errors(numbers)
    telling = _Response(form.model, request, said, door.now_unix_s, numbers)
    await tell(door, exchange, request, telling, is_stream=form.is_stream)


def _read(fields: Fields, exchange: Exchange, door: Door) -> tuple[RequestInput, Form, dict[str, Any]]:
    """And what the response repeats. Raises InvalidRequest."""
    instructions = fields.text("instructions")
    messages = _input(fields)
    max_tokens = fields.integer("max_output_tokens", at_least=1)
    text = fields.inner("text")
    text.only("format", {"type": "text"})
    text.ignore("verbosity")
    text.close()
    metadata = fields.members_of("metadata")
    for name, neutral in _NOT_BUILT:
        fields.only(name, *neutral)
    fields.ignore(*_HARMLESS)
    request, form = asked.read(
        fields, asked.caller_of(exchange.headers), door.intake.base_model, max_tokens=max_tokens, top_logprobs=None
    )
    fields.close()
    exchange.names = {**form.names, "max_tokens": "max_output_tokens", "messages": "input"}
    fields.check()
    prompt = ChatPrompt([("system", instructions), *messages] if instructions else messages)
    said = {"instructions": instructions or None, "metadata": metadata, "max_output_tokens": max_tokens}
    return replace(request, prompt=prompt, n=1, request_id=exchange.request_id), form, said


def _input(fields: Fields) -> list[tuple[str, str]]:
    if isinstance(fields.peek("input"), str):
        return [("user", fields.text("input"))]
    given = fields.peek("input")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type", "message") != "message":
            fields.ignore("input")
            fields.wrong(f"input[{index}]", "must be a message: no other item is supported")
            return []
    return read_messages(fields, "input", kinds=_KINDS, ignored=("type", "id", "status", "phase"))


class _Response:
    """api.telling.Telling."""

    def __init__(
        self,
        model: str,
        request: RequestInput,
        said: Mapping[str, Any],
        now_unix_s: Callable[[], float],
        numbers: itertools.count[int],
    ) -> None:
        self._now_unix_s = now_unix_s
        self._numbers = numbers
        self._item_id = f"msg_{request.request_id}"
        self._common = {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "created_at": int(now_unix_s()),
            "model": model,
            "error": None,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "presence_penalty": request.sampling.presence_penalty,
            "frequency_penalty": request.sampling.frequency_penalty,
            **_UNSAID,
            **said,
        }
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def begin(self, told: Told) -> bytes:
        begun = {**self._common, **_BEGUN}
        item = {**self._item("", "in_progress"), "content": []}
        return b"".join(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=_part("")),
            ]
        )

    def text(self, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, told: Told) -> bytes:
        whole = self.whole(told)
        [item] = whole["output"]
        return b"".join(
            [
                self._event("response.output_text.done", **self._place, text=told.text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=_part(told.text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{whole['status']}", response=whole),
            ]
        )

    def whole(self, told: Told) -> dict[str, Any]:
        status = "incomplete" if told.is_cut else "completed"
        usage = told.usage
        return {
            **self._common,
            "status": status,
            "completed_at": None if told.is_cut else int(self._now_unix_s()),
            "incomplete_details": {"reason": "max_output_tokens"} if told.is_cut else None,
            "output": [self._item(told.text, status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _event(self, name: str, **more: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **more})


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
