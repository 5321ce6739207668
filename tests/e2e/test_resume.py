"""A worker of two is killed, or drained, under streams of every kind: each goes on, token for token as without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Channel, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
STREAMS = 64
ADAPTERS = ("upper", "", "upper:0.5+reverse:0.5", "")
TOKENS = 240
END_S = 120.0


@dataclass
class Answer:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)
    times: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def longest_gap_s(self) -> float:
        return max(later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False))


def requests() -> list[tuple[inference_pb2.GenerateRequest, str]]:
    """With their adapters: greedy with log-probabilities, sampled with penalties, two choices, constrained."""
    made = []
    for number in range(STREAMS):
        request = inference_pb2.GenerateRequest(text=f"do:{number}=", max_tokens=TOKENS, ignore_eos=True)
        sampling = request.sampling
        match number % 4:
            case 0:
                sampling.temperature, sampling.top_logprobs = 0.0, 1
            case 1:
                sampling.seed, sampling.frequency_penalty, sampling.min_tokens = number, 0.3, 200
            case 2:
                sampling.seed, request.n = number, 2
                request.stop.append("qqqq")
            case _:
                sampling.seed = number
                request.constraint.regex = "[a-z]{300}"
        made.append((request, ADAPTERS[number // 4 % len(ADAPTERS)]))
    return made


async def ask(channel: Channel, key: str, request: inference_pb2.GenerateRequest, adapter: str, answer: Answer) -> None:
    metadata = {**bearer(key), "x-tenant-id": "acme", **({"x-adapter-id": adapter} if adapter else {})}
    stream = channel.stream(GENERATE, request, metadata=metadata)
    while (frame := await stream.read()) is not None:
        if frame.HasField("delta"):
            delta = frame.delta
            known = answer.tokens.setdefault(delta.choice, [])
            assert delta.first_position == len(known), "positions are dense"
            known += delta.token_ids
            answer.texts[delta.choice] = answer.texts.get(delta.choice, "") + delta.text
            answer.logprobs += [position.logprob for position in delta.logprobs]
            answer.times.append(time.monotonic())
            answer.begun.set()
        if frame.HasField("finished"):
            answer.finished = frame.finished


def key_of(cluster: UpCluster) -> str:
    return Path(cluster.ready["key_file"]).read_text().strip()


async def play(cluster: UpCluster, disturb: str = "") -> list[Answer]:
    key = key_of(cluster)
    channel = GrpcTransport().connect(cluster.router)
    answers = [Answer() for _ in range(STREAMS)]
    try:
        async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
            for (request, adapter), answer in zip(requests(), answers, strict=True):
                group.create_task(ask(channel, key, request, adapter, answer))
            if disturb:
                await asyncio.gather(*(answer.begun.wait() for answer in answers[: STREAMS // 2]))
                if disturb == "drain":
                    assert (await cluster.manylora("drain", "worker-1")).exit_code == 0
                else:
                    os.kill(cluster.pid("worker-1"), getattr(signal, disturb))
    finally:
        await channel.close()
    return answers


@pytest.mark.parametrize("disturb", ["SIGKILL", "drain", pytest.param("SIGTERM", marks=pytest.mark.wide)])
async def test_answers_of_a_worker_that_goes_are_those_of_one_that_stays(whole: UpCluster, disturb: str) -> None:
    undisturbed = await play(whole)
    assert not any(answer.finished.usage.resumed for answer in undisturbed)
    disturbed = await play(whole, disturb)
    for number, (answer, other) in enumerate(zip(disturbed, undisturbed, strict=True)):
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED, number
        assert (answer.tokens, answer.texts) == (other.tokens, other.texts), number
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert answer.finished.choices == other.finished.choices
        usage, expected = answer.finished.usage, other.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    resumed = [answer for answer in disturbed if answer.finished.usage.resumed]
    assert resumed, "nobody was on the worker that went"
    gaps = sorted(answer.longest_gap_s for answer in resumed)
    told = {
        "bench": "resume",
        "case": disturb,
        "streams": STREAMS,
        "resumed": len(resumed),
        "pause_s_p50": round(statistics.median(gaps), 3),
        "pause_s_p95": round(gaps[len(gaps) * 95 // 100], 3),
        "longest_gap_s_of_others": round(max(a.longest_gap_s for a in disturbed if a not in resumed), 3),
    }
    print(json.dumps(told))
    await whole.wait_complete()
