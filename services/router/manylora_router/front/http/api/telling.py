"""One request with one answer, for the endpoints whose events tell its parts by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from manylora.v1 import common_pb2

from manylora_router.front.generation import generate
from manylora_router.front.http.api.answers import Door, headers_of
from manylora_router.front.http.exchange import Exchange
from manylora_router.guard.admission import RequestInput
from manylora_router.request.frames import ChoiceEnd


@dataclass
class Told:
    """An answer, as far as it has come."""

    prompt_tokens: int = 0
    text: str = ""
    end: ChoiceEnd = field(default_factory=lambda: ChoiceEnd(0))
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)

    @property
    def is_cut(self) -> bool:
        """By max_tokens."""
        return self.end.finish_reason == common_pb2.FINISH_REASON_LENGTH


class Telling(Protocol):
    """One endpoint's words."""

    def begin(self, told: Told) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def end(self, told: Told) -> bytes: ...

    def whole(self, told: Told) -> dict[str, Any]: ...


async def tell(door: Door, exchange: Exchange, request: RequestInput, telling: Telling, *, is_stream: bool) -> None:
    told = Told()
    async with (
        exchange.watched(is_streaming=is_stream),
        aclosing(generate(request, intake=door.intake, calls=door.calls)) as frames,
    ):
        headers: dict[str, str] = {}
        async for frame in frames:
            events: list[bytes] = []
            if frame.started is not None:
                told.prompt_tokens = len(frame.started.prompt_token_ids)
                headers = headers_of(frame.started)
                events.append(telling.begin(told))
            if frame.delta is not None and frame.delta.text:
                told.text += frame.delta.text
                events.append(telling.text(frame.delta.text))
            if frame.finished is not None:
                told.end, told.usage = frame.finished.choices[0], frame.finished.usage
                if frame.finished.outcome == common_pb2.OUTCOME_COMPLETED:
                    events.append(telling.end(told))
            if is_stream and events:
                await exchange.begin_events(headers)
                await exchange.write(b"".join(events))
        if is_stream:
            await exchange.end()
        else:
            await exchange.answer(telling.whole(told), headers=headers)


def event(document: Mapping[str, Any]) -> bytes:
    """Its name is its type."""
    data = json.dumps(document, separators=(",", ":"))
    return f"event: {document['type']}\ndata: {data}\n\n".encode()
