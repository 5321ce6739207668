"""What a request that was cut short is charged: its worker's word, or without one what is known."""

from __future__ import annotations

import asyncio

import pytest
from manylora.v1 import common_pb2, worker_pb2
from router_fakes import STARTED, RouterCluster, Script, ids_of, say, simulate, text_request, tokens, until

PROMPT = "a prompt of some length"
NUM_PROMPT = len(ids_of(PROMPT))


def word(*, prompt: int, cached: int = 0, output: int = 0) -> worker_pb2.ExecuteFinished:
    return worker_pb2.ExecuteFinished(
        outcome=common_pb2.OUTCOME_WORKER_LOST,
        prompt_tokens=prompt,
        cached_prompt_tokens=cached,
        output_tokens=output,
    )


def silent(*, begins: bool) -> Script:
    async def script(request):  # type: ignore[no-untyped-def]
        if begins:
            yield STARTED
        await asyncio.sleep(60)
        yield STARTED

    return script


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_prompt_is_charged_as_far_as_it_was_computed(begins: bool, how: str) -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.word = word(prompt=12, cached=4)
        stream = cluster.open(text_request(PROMPT), timeout=0.5 if how == "deadline" else None)
        await until(lambda: any(w.running for w in cluster.workers))
        await asyncio.sleep(0.05)
        if how == "cancelled":
            stream.cancel()
        await until(lambda: bool(cluster.scheduler.settled))
        ((_, charged),) = cluster.scheduler.settled
        assert charged == 12 - 4
        assert sum(len(worker.asked_ends) for worker in cluster.workers) == 1

    simulate(test, script=silent(begins=begins))


def test_output_that_nobody_read_is_charged() -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.word = word(prompt=NUM_PROMPT, output=100)
        stream = cluster.open(text_request(PROMPT, max_tokens=200))
        await stream.read()
        await stream.read()
        stream.cancel()
        await until(lambda: bool(cluster.scheduler.settled))
        assert cluster.scheduler.settled[0][1] == NUM_PROMPT + 100

    simulate(test, script=say("x" * 1000, pause_s=0.01))


def test_without_the_workers_word_a_prompt_that_was_begun_counts_whole() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request(PROMPT))
        await stream.read()
        stream.cancel()
        await until(lambda: bool(cluster.scheduler.settled))
        assert cluster.scheduler.settled[0][1] == NUM_PROMPT

    simulate(test, script=silent(begins=True))


def test_an_answer_that_ended_is_charged_what_its_usage_says() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(PROMPT, max_tokens=5))
        await until(lambda: bool(cluster.scheduler.settled))
        assert cluster.scheduler.settled[0][1] == NUM_PROMPT + 5 == NUM_PROMPT + answer.finished.usage.completion_tokens
        assert not any(worker.asked_ends for worker in cluster.workers)

    simulate(test, script=say("x" * 1000))


def test_what_the_worker_ends_is_charged_by_its_last_word() -> None:
    async def script(request):  # type: ignore[no-untyped-def]
        yield STARTED
        yield tokens(1, 0, ids_of("ab"))
        last = word(prompt=9, output=7)
        last.outcome = common_pb2.OUTCOME_ADAPTER_FAILED
        yield worker_pb2.ExecuteResponse(frame=2, finished=last)

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(PROMPT))
        assert answer.finished.outcome == common_pb2.OUTCOME_ADAPTER_FAILED
        assert answer.finished.usage.prompt_tokens == 9
        await until(lambda: bool(cluster.scheduler.settled))
        assert cluster.scheduler.settled[0][1] == 9 + 7

    simulate(test, script=script)
