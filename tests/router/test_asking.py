"""What a gate asks, and what it asks again: as the tenant's batch, behind its others, until its time is up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from manylora.v1 import common_pb2
from manylora_router.admin.asking import AT_A_TIME, Asking, CandidateFailed, Inconclusive, Subject
from manylora_router.guard.admission import ChatPrompt, RequestInput, TextPrompt, TokenPrompt, alone
from manylora_router.quality.samples import Sample
from manylora_router.request.frames import Degraded, Delta, Finished, Frame
from manylora_shared.errors import (
    AdapterFailed,
    InvalidRequest,
    ManyloraError,
    Overloaded,
    Quarantined,
    QuotaExceeded,
    WorkerLost,
)
from manylora_shared.ids import AdapterName, AdapterUid, TenantId
from manylora_shared.tenancy.adapter_gate import Against
from manylora_sim import loop as simulation

SAMPLE = Sample("ask", [], "good", None, None)
CANDIDATE = Subject(Against.CANDIDATE, candidate=alone(AdapterName("lower"), AdapterUid("a" * 64)))
BEFORE = Subject(Against.BEFORE, "lower@1")
TIMINGS = common_pb2.Timings(ttft_ms=10.0, total_ms=40.0, adapter_wait_ms=5.0)


class Cluster:
    """Answers `text`, after it has raised or done what stands in `first`."""

    def __init__(self, *first: ManyloraError | Degraded, text: str = "good", logprobs: Sequence[float] = ()) -> None:
        self.first = list(first)
        self.text = text
        self.logprobs = logprobs
        self.asked: list[RequestInput] = []
        self.running = self.most = 0

    async def generate(self, request: RequestInput) -> AsyncGenerator[Frame]:
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.01)
            event = self.first.pop(0) if self.first else None
            if isinstance(event, ManyloraError):
                raise event
            yield Frame(0, prompt_logprobs=[common_pb2.PositionLogprobs(logprob=each) for each in self.logprobs])
            yield Frame(1, delta=Delta(0, 0, [1], self.text))
            usage = common_pb2.Usage(completion_tokens=4)
            yield Frame(2, finished=Finished(common_pb2.OUTCOME_COMPLETED, [], usage, TIMINGS, "w", event))
        finally:
            self.running -= 1

    async def tokenize(self, request: RequestInput) -> tuple[Sequence[int], int]:
        assert isinstance(request.prompt, TextPrompt)
        return [ord(each) for each in request.prompt.text], 256

    def asking(self) -> Asking:
        return Asking(self.generate, self.tokenize, TenantId("acme"), "Bearer lent", "small")


def run(work: Any) -> Any:
    return simulation.run(work, seed=0).result


def test_a_sample_is_asked_in_batch_greedily_and_behind_the_tenants_others() -> None:
    cluster = Cluster()
    assert run(cluster.asking().answer(BEFORE, SAMPLE, "exact", 7)).answer == "good"
    [asked] = cluster.asked
    assert (asked.request_class, asked.priority, asked.tenant) == ("batch", "-100", "acme")
    assert (asked.adapter, asked.candidate, asked.max_tokens) == ("lower@1", None, 7)
    assert (asked.sampling.temperature, asked.authorization) == (0.0, "Bearer lent")
    chat = replace(SAMPLE, prompt=None, messages=[("user", "hi")], max_tokens=3)
    run(cluster.asking().answer(CANDIDATE, chat, "exact", 7))
    assert cluster.asked[-1].prompt == ChatPrompt([("user", "hi")])
    assert cluster.asked[-1].model == "small"
    assert (cluster.asked[-1].adapter, cluster.asked[-1].candidate, cluster.asked[-1].max_tokens) == (
        "",
        CANDIDATE.candidate,
        3,
    )


def test_what_may_come_again_is_asked_again() -> None:
    degraded = Degraded(max_tokens=16, asked_max_tokens=128, overload_level=40)
    failures = [Overloaded("full", retry_after_s=1.0), QuotaExceeded("q", retry_after_s=2.0), WorkerLost("w"), degraded]
    cluster = Cluster(*failures)
    assert run(cluster.asking().answer(CANDIDATE, SAMPLE, "exact", 7)).answer == "good"
    assert len(cluster.asked) == 5


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequest.of("max_tokens", "is too much"), "max_tokens: is too much"),
        (Quarantined("it is quarantined"), "it is quarantined"),
        (QuotaExceeded("it can never fit"), "it can never fit"),
    ],
)
def test_what_says_nothing_of_the_adapter_is_inconclusive(error: ManyloraError, told: str) -> None:
    with pytest.raises(Inconclusive, match=told):
        run(Cluster(error).asking().answer(CANDIDATE, SAMPLE, "exact", 7))


def test_workers_that_are_lost_again_and_again_are_inconclusive() -> None:
    with pytest.raises(Inconclusive, match="it is lost"):
        run(Cluster(*[WorkerLost("it is lost")] * 9).asking().answer(CANDIDATE, SAMPLE, "exact", 7))


def test_an_adapter_that_fails_is_the_candidates_fault_alone() -> None:
    with pytest.raises(CandidateFailed, match="overflow"):
        run(Cluster(AdapterFailed("overflow")).asking().answer(CANDIDATE, SAMPLE, "exact", 7))
    with pytest.raises(Inconclusive, match="the version in force failed"):
        run(Cluster(AdapterFailed("overflow")).asking().answer(BEFORE, SAMPLE, "exact", 7))


def test_perplexity_is_of_the_expected_tokens_behind_the_prompt() -> None:
    cluster = Cluster(logprobs=[-9.0, -9.0, -0.5, -1.0, -1.5, -1.0])
    judged = run(cluster.asking().answer(CANDIDATE, SAMPLE, "perplexity", 7))
    assert judged.score == pytest.approx(math.exp(-1.0))
    assert judged.answer == "perplexity 2.718"
    assert cluster.asked[0].prompt == TokenPrompt([ord(each) for each in "askgood"])
    assert (cluster.asked[0].max_tokens, cluster.asked[0].sampling.prompt_logprobs) == (1, 0)
    with pytest.raises(Inconclusive, match="no log-probabilities"):
        run(Cluster().asking().answer(CANDIDATE, SAMPLE, "perplexity", 7))


def test_requests_at_a_time_are_bounded_and_figures_are_the_frames() -> None:
    cluster = Cluster()

    async def many() -> None:
        asking = cluster.asking()
        await asyncio.gather(*(asking.answer(CANDIDATE, SAMPLE, "exact", 7) for _ in range(40)))

    run(many())
    assert cluster.most == AT_A_TIME
    measured = run(Cluster().asking().measure(BEFORE, [1, 2]))
    assert (measured.ttft_ms, measured.token_ms, measured.adapter_wait_ms) == (10.0, 10.0, 5.0)
