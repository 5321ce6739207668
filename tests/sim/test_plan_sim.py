"""What a plan predicts, against the cluster that it plans: real router, scheduler and workers in virtual time, whose
steps take what the plan's curve says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from manylora.capacity.planning.curve import Curve
from manylora.capacity.planning.plan import Plan, Wanted, plan
from manylora.capacity.planning.play import quantile
from manylora.capacity.planning.shapes import Gpu, shape_of
from manylora.capacity.planning.traffic import Request, Traffic
from manylora.v1 import common_pb2
from manylora_shared.composition import uids_of
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_sim.loop import run
from manylora_sim.loop_runtime import LoopRuntime
from manylora_sim.worker import FakeWorkerConfig
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits, prefix_options
from manylora_worker.kinds.api import StepBatch

from tests.sim import cluster as simulated
from tests.sim.cluster import TENANTS, Cluster, Engine, adapters_of
from tests.sim.traffic import Call
from tests.sim.traffic import Traffic as Calls

MARGIN = 0.2
MARGIN_MS = 3.0
"""Beside that share, of a latency: what the way of a message takes is drawn."""
SECONDS = 12.0
RANK = 8
NUM_BLOCKS = 3000
SHAPE = shape_of(
    {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 259,
    },
    "small",
)
GPU = Gpu("simulated", 4.0, 1.0, 100.0)
FREE = {QosClass.INTERACTIVE: ClassPolicy(1), QosClass.STANDARD: ClassPolicy(1), QosClass.BATCH: ClassPolicy(1)}


def curve_of(rng: Random, service_ms: float) -> Curve:
    least = rng.uniform(8, 25)
    rows = [1, 4, 16, 64]
    points = [(n, least * (1 + 0.02 * n)) for n in rows]
    return Curve(
        GPU,
        SHAPE,
        points,
        context=60,
        kv_token_ms=0.0005,
        adapter_ms=rng.uniform(0, 3),
        row_ms=0.01,
        rank_ms=rng.uniform(0, 0.02),
        max_rank_ms=0.01,
        prompt_token_ms=(token_ms := rng.uniform(0.05, 0.4)),
        adapter_prompt_token_ms=token_ms * 1.1,
        service_ms=service_ms,
        load_host_mb_s=500.0,
        load_device_mb_s=1e6,
        is_measured=True,
        origin="drawn",
        is_ahead=False,
    )


def traffic_of(rng: Random, rate: float) -> Traffic:
    requests, at_s = [], 0.0
    longest = rng.choice([30, 60, 90])
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        tenant = rng.choice(list(TENANTS))
        adapter = rng.choice(["", *adapters_of(tenant)])
        requests.append(
            Request(
                at_s,
                tenant,
                "standard",
                adapter and f"{tenant}/{adapter}",
                RANK if adapter else 0,
                rng.randint(4, 60),
                rng.randint(8, longest),
            )
        )
    return Traffic(requests, SECONDS)


class PacedCluster(Cluster):
    """Workers of the plan's slots, whose steps take what its curve says; every adapter has room."""

    def __init__(self, seed: int, curve: Curve, *, workers: int, slots: int) -> None:
        super().__init__(seed, routers=1, schedulers=1, workers=workers, overload=False)
        self.curve, self.slots = curve, slots

    def _worker_settings(self, name: str) -> FakeWorkerConfig:
        return FakeWorkerConfig(
            worker_id=name,
            sequence_slots=self.slots,
            block_size=simulated.BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            prefix_cache_share=0.0,
            host_adapter_mb=1.0,
            device_adapter_mb=1.0,
            max_frames_per_s=simulated.FRAMES_PER_S,
        )

    def _engine(self, settings: WorkerConfig) -> Engine:
        runner = FakeRunner(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            vocab_size=simulated.VOCAB_SIZE,
            max_context_tokens=simulated.MAX_CONTEXT_TOKENS,
        )
        backend = FakeAdapterBackend(self.loop.time)
        limits = engine_limits(settings)
        core = EngineCore(runner, backend, limits, prefix_options(settings, simulated.MODEL, secret=bytes(32)))
        runtime = LoopRuntime(core, backend, simulated.MODEL, max_requests=limits.max_requests, step_s=self._step_s)
        backend.when_due = lambda due: self.loop.call_at(due, runtime.wake)
        return Engine(core, runner, runtime, backend)

    def _step_s(self, batch: StepBatch) -> float:
        decoding = [chunk for chunk in batch.chunks if chunk.output_token_ids]
        uids = {uid for chunk in batch.chunks if chunk.adapter_uid for uid in uids_of(chunk.adapter_uid)}
        prompt_tokens = sum(len(chunk.token_ids) for chunk in batch.chunks if not chunk.output_token_ids)
        ms = self.curve.step_ms(
            len(decoding),
            sum(chunk.start_position + 1 for chunk in decoding),
            sum_ranks=RANK * len(uids),
            max_rank=RANK if uids else 0,
            prompt_tokens=prompt_tokens,
        )
        return ms / 1e3


async def played(seed: int, curve: Curve, workers: int, slots: int, requests: Sequence[Request]) -> list[Call]:
    cluster = PacedCluster(seed, curve, workers=workers, slots=slots)
    await cluster.start()
    store = cluster.store_server.client()
    for tenant in TENANTS:
        await cluster.put_policy(store, TenantPolicy(TenantId(tenant), FREE))
    await asyncio.sleep(1.0)
    traffic, calls = Calls(cluster, seed), []
    for adapter in sorted({(request.tenant, request.adapter) for request in requests if request.adapter}):
        call_of(traffic, Request(0.0, *adapter[:1], "standard", adapter[1], RANK, 4, 2))  # plans are of warm clusters
        await asyncio.sleep(0.2)
    await traffic.all_ended(20.0)
    begins = cluster.loop.time()
    for request in requests:
        await asyncio.sleep(max(0.0, begins + request.at_s - cluster.loop.time()))
        calls.append(call_of(traffic, request))
    await traffic.all_ended(120.0)
    for call in calls:
        assert call.finished is not None, call.describe()
        assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED, call.describe()
    return calls


def call_of(traffic: Calls, request: Request) -> Call:
    call = traffic.plain(request.tenant)
    call.qos_class, call.n, call.is_greedy = "standard", 1, True
    call.adapter = request.adapter.partition("/")[2]
    call.prompt = [3 + (call.number * 7 + i) % 250 for i in range(request.prompt_tokens)]
    call.max_tokens, call.ignores_eos = request.output_tokens, True
    traffic.begin(call)
    return call


def ttfts(calls: Sequence[Call]) -> list[float]:
    """To the first frame with tokens."""
    found = []
    for call in calls:
        at = next(at for at, frame in zip(call.frame_times, call.frames, strict=True) if frame.HasField("delta"))
        found.append((at - call.began_at) * 1e3)
    return found


def service_ms(seed: int) -> float:
    """As bench/curves.py has it: of a caller that is alone, what the first step does not take."""
    curve = curve_of(Random(seed), 0.0)
    alone = [Request(0.5 * i, "acme", "standard", "", 0, 8, 2) for i in range(12)]
    calls = run(played(seed, curve, 1, 4, alone), seed=seed).result
    return quantile(ttfts(calls), 0.5) - curve.step_ms(0, 0, prompt_tokens=8)


def planned(seed: int) -> Plan:
    rng, curve = Random(seed), curve_of(Random(seed), service_ms(seed))
    wanted = Wanted(ttft_ms=rng.choice([200.0, 400.0]), spare=0.0 if seed % 2 else 0.25)
    return plan(traffic_of(rng, rng.uniform(5, 30)), curve, wanted)


@pytest.mark.parametrize("seed", range(5))
def test_the_planned_cluster_does_what_the_plan_says(seed: int) -> None:
    made = planned(seed)
    calls = run(played(seed, made.curve, made.workers, made.settings.slots, made.traffic.requests), seed=seed).result
    seen_s = max(call.ended_at or 0.0 for call in calls) - calls[0].began_at
    seen_rate = sum(request.output_tokens for request in made.traffic.requests) / seen_s
    assert seen_rate == pytest.approx(made.expected.tokens_per_s, rel=MARGIN)
    seen = ttfts(calls)
    for part in (0.5, 0.95):
        expected = made.expected.percentile("ttft_ms", part)
        assert quantile(seen, part) == pytest.approx(expected, rel=MARGIN, abs=MARGIN_MS)
    assert quantile(seen, 0.95) <= made.wanted.ttft_ms * (1 + MARGIN)
