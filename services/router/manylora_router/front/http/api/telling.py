"""One request with one answer, for the endpoints whose events tell its parts by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from manylora.v1 import common_pb2

from manylora_router.dialect.blocks import Block, Blocks, Kind
from manylora_router.dialect.pieces import Piece
from manylora_router.front.generation import generate
from manylora_router.front.http.api import outliving
from manylora_router.front.http.api.answers import Door, headers_of
from manylora_router.front.http.api.tooling import Reading
from manylora_router.front.http.exchange import Exchange
from manylora_router.guard.admission import RequestInput
from manylora_router.request.frames import ChoiceEnd


@dataclass
class Told:
    """An answer, as far as it has come."""

    prompt_tokens: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    end: ChoiceEnd = field(default_factory=lambda: ChoiceEnd(0))
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)

    @property
    def is_cut(self) -> bool:
        """By max_tokens."""
        return self.end.finish_reason == common_pb2.FINISH_REASON_LENGTH


class Telling(Protocol):
    """One endpoint's words. A block is told by its index among the answer's."""

    def begin(self, told: Told) -> bytes: ...

    def open(self, index: int, block: Block) -> bytes: ...

    def delta(self, index: int, block: Block, text: str) -> bytes: ...

    def close(self, index: int, block: Block) -> bytes: ...

    def end(self, told: Told) -> bytes: ...

    def whole(self, told: Told) -> dict[str, Any]: ...


async def tell(
    door: Door, exchange: Exchange, request: RequestInput, telling: Telling, reading: Reading, *, is_stream: bool
) -> None:
    told, reader = Told(), None
    (request,) = outliving.asked(exchange, [request], is_stream=is_stream)
    async with (
        exchange.watched(is_streaming=is_stream),
        aclosing(generate(request, intake=door.intake, calls=door.calls, outliving=door.outliving)) as frames,
    ):
        headers: dict[str, str] = {}
        async for frame in frames:
            events: list[bytes] = []
            if frame.started is not None:
                told.prompt_tokens = len(frame.started.prompt_token_ids)
                headers = headers_of(frame.started)
                reader = reading.reader(frame.started.prompt_token_ids)
                events.append(telling.begin(told))
            if reader is not None and frame.delta is not None:
                events += _tell(reader.push(frame.delta.text), told.blocks, telling)
            if frame.finished is not None:
                told.end, told.usage = frame.finished.choices[0], frame.finished.usage
                if reader is not None and frame.finished.outcome == common_pb2.OUTCOME_COMPLETED:
                    events += _tell(reader.finish(), told.blocks, telling)
                    events += _last(told.blocks, telling)
                    events.append(telling.end(told))
            if is_stream and any(events):
                await exchange.begin_events(headers)
                await exchange.write(b"".join(events))
        if is_stream:
            await exchange.end()
        else:
            told.blocks = told.blocks.settled()
            await exchange.answer(telling.whole(told), headers=headers)


def _tell(pieces: Sequence[Piece], blocks: Blocks, telling: Telling) -> Iterator[bytes]:
    for piece in pieces:
        before = len(blocks.all)
        text = blocks.add(piece)
        index = len(blocks.all) - 1
        if index == before:
            if index:
                yield telling.close(index - 1, blocks.all[index - 1])
            yield telling.open(index, blocks.all[index])
        if text:
            yield telling.delta(index, blocks.all[index], text)


def _last(blocks: Blocks, telling: Telling) -> Iterator[bytes]:
    """An answer has a text at least, be it empty."""
    if not blocks.all:
        blocks.all.append(Block(Kind.TEXT))
        yield telling.open(0, blocks.all[0])
    yield telling.close(len(blocks.all) - 1, blocks.all[-1])


def event(document: Mapping[str, Any]) -> bytes:
    """Its name is its type."""
    data = json.dumps(document, separators=(",", ":"))
    return f"event: {document['type']}\ndata: {data}\n\n".encode()
