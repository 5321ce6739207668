"""What one reader gets of a request: when, how much at a time, and when it is too much."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from manylora_shared.ids import RequestId
from manylora_sim import loop as simulation
from manylora_worker.hosting.output_stream import EndKind, OutputStream, StreamEnd
from manylora_worker.kinds.api import FinishReason, TokenOutput

from tests.worker.worker_fakes import request


def test_an_end_that_does_not_come_is_waited_for_half_an_interval() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream = OutputStream(dataclasses.replace(request(max_tokens=10), n=2))

        def put(position: int, tokens: int) -> None:
            for choice in range(2):
                stream.put(TokenOutput(RequestId("r"), choice, position, tuple(range(tokens))))

        put(0, 1)
        await stream.read(interval_s=0.055)
        put(1, 6)
        batch = await stream.read(interval_s=0.055)
        assert len(batch.outputs) == 2
        assert batch.end is None
        assert loop.time() == pytest.approx(4 / 64 + 0.055 / 2), "the next 64th of a second after 0.055, and half of it"

    simulation.run(main(), seed=1)


def put(stream: OutputStream, position: int, *tokens: int, reason: FinishReason | None = None) -> None:
    stream.put(TokenOutput(RequestId("r"), 0, position, tokens, finish_reason=reason))


def test_it_is_full_at_its_bound_and_empty_when_it_was_read() -> None:
    async def main() -> None:
        read: list[OutputStream] = []
        stream = OutputStream(request(max_tokens=10), read.append, pause_unread_tokens=3)
        put(stream, 0, 1, 2)
        assert not stream.is_full
        put(stream, 2, 3)
        assert stream.is_full
        batch = await stream.read()
        assert [token for output in batch.outputs for token in output.token_ids] == [1, 2, 3]
        assert not stream.is_full
        assert read == [], "it was not paused"
        stream.is_paused = True
        put(stream, 3, 4)
        await stream.read()
        assert read == [stream]

    simulation.run(main(), seed=1)


def test_the_end_comes_behind_what_was_not_read() -> None:
    async def main() -> None:
        stream = OutputStream(request(max_tokens=2))
        put(stream, 0, 1)
        put(stream, 1, 2, reason=FinishReason.LENGTH)
        stream.end(StreamEnd(EndKind.COMPLETED))
        assert (stream.is_ended, stream.unfinished_choices) == (True, 0)
        batch = await stream.read()
        assert (len(batch.outputs), batch.end) == (2, StreamEnd(EndKind.COMPLETED))

    simulation.run(main(), seed=1)


def test_whoever_looks_waits_no_longer_than_told() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream = OutputStream(request(max_tokens=5))
        await stream.has_something(2.0)
        assert loop.time() == 2.0
        loop.call_later(1.0, put, stream, 0, 1)
        await stream.has_something(60.0)
        assert loop.time() == 3.0
        await stream.has_something(60.0)
        assert loop.time() == 3.0

    simulation.run(main(), seed=1)
