"""What a frame to the caller joins: the beginning with the first tokens, the end with the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from manylora.v1 import common_pb2, worker_pb2
from router_fakes import (
    STARTED,
    Answer,
    RouterCluster,
    Script,
    finished,
    read_all,
    simulate,
    text_request,
    tokens,
)


def _kinds(answer: Answer) -> list[str]:
    """Of each frame what it tells: s, d and f."""
    parts = ("started", "delta", "finished")
    return ["".join(part[0] for part in parts if frame.HasField(part)) for frame in answer.frames]


def _at_once(*chunks: list[int], outcome: common_pb2.Outcome = common_pb2.OUTCOME_COMPLETED) -> Script:
    """A worker whose messages leave at two times: half a second after the first ones, the last chunk and the end."""

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        position = 0
        for frame, chunk in enumerate(chunks, 1):
            is_last = frame == len(chunks)
            if is_last:
                await asyncio.sleep(0.5)
            reason = common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_UNSPECIFIED
            yield tokens(frame, position, chunk, finish=reason)
            position += len(chunk)
        yield finished(len(chunks) + 1, outcome)

    return script


def test_the_first_tokens_come_with_the_beginning_and_the_last_with_the_end() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert _kinds(answer) == ["sd", "d", "df"]
        assert answer.ids_of() == [5, 6, 7, 8, 9]
        assert answer.finished.usage.completion_tokens == 5

    simulate(test, script=_at_once([5, 6], [7], [8, 9]), delay_s=0.001)


def test_a_beginning_without_tokens_is_told_by_itself() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request())
        loop = asyncio.get_running_loop()
        first = await stream.read()
        assert first.HasField("started")
        assert not first.HasField("delta")
        told_at = loop.time()
        answer = await read_all(stream, Answer(frames=[first]))
        assert loop.time() - told_at >= 0.4, "it waited for the tokens"
        assert _kinds(answer) == ["s", "df"]

    simulate(test, script=_at_once([5, 6]), delay_s=0.001)


def test_an_error_behind_tokens_is_told_with_them_and_takes_none_away() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert _kinds(answer) == ["sd", "df"]
        assert answer.ids_of() == [5, 6, 7]
        end = answer.finished
        assert (end.outcome, end.usage.completion_tokens) == (common_pb2.OUTCOME_INTERNAL, 3)

    simulate(test, script=_at_once([5, 6], [7], outcome=common_pb2.OUTCOME_INTERNAL), delay_s=0.001)
