"""What a tenant feels of its neighbour, in virtual time: a steady interactive victim alone, and beside an attacker of
each kind. Both have the same weights and no bounds, so nothing but the schedule stands between them.

The attacker asks in the victim's own class.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest
from manylora.v1 import common_pb2
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy
from manylora_sim.loop import run
from manylora_worker.planning.step_planner import QUANTUM_TOKENS

from tests.sim import validate
from tests.sim.cluster import BROKEN_ADAPTER, STEP_S, Cluster, adapters_of
from tests.sim.traffic import SHARED_PREFIX, Call, Traffic

VICTIM, ATTACKER = "bolt", "acme"
STREAMS = 2
PERIOD_S = 0.25
"""The victim asks for some five tokens in a step of the whole cluster at most: a tenth of what it can do."""
MEASURED_S = 4.0
WARM_UP_S = 1.5
OUTSTANDING = 24
"""Calls of the attacker's: several times the slots of the cluster."""
REFILL_S = 0.1
MEAN_STEP_S = 1.25 * STEP_S
BOUND_S = QUANTUM_TOKENS * MEAN_STEP_S
"""How much longer the victim's TTFT p95 may be than alone: a quantum, at the end of which a slot comes free."""


def short(call: Call) -> None:
    call.prompt, call.max_tokens = call.prompt[:1], 4


def long_prompts(call: Call) -> None:
    call.prompt, call.max_tokens = [1 + (call.number * 7 + i) % 255 for i in range(140)], 4


def long_outputs(call: Call) -> None:
    call.prompt, call.max_tokens = call.prompt[:3], 150


def adapters(call: Call) -> None:
    mine = adapters_of(ATTACKER)
    call.adapter, call.max_tokens = mine[call.number % len(mine)], 4


def broken_adapters(call: Call) -> None:
    call.adapter = BROKEN_ADAPTER


def slow_readers(call: Call) -> None:
    call.prompt, call.max_tokens, call.read_pause_s = call.prompt[:3], 150, 1.0


def readers_that_stop(call: Call) -> None:
    call.prompt, call.max_tokens, call.read_pause_s = call.prompt[:3], 150, 40.0


def prefixes(call: Call) -> None:
    call.prompt, call.max_tokens = [1 + call.number % 255, *[5 + i for i in range(60)]], 2


def many_choices(call: Call) -> None:
    call.n, call.max_tokens = 3, 60


def cancels(call: Call) -> None:
    call.prompt, call.max_tokens, call.cancel_after_frames = call.prompt[:3], 150, 1


ATTACKS = [
    short,
    long_prompts,
    long_outputs,
    adapters,
    broken_adapters,
    slow_readers,
    readers_that_stop,
    prefixes,
    many_choices,
    cancels,
]


async def ttfts(seed: int, attack: Callable[[Call], None] | None) -> tuple[list[float], Traffic]:
    """How long the victim's calls waited for their first tokens; those of the attacker are all begun by then."""
    cluster = Cluster(seed, workers=2)
    await cluster.start()
    store = cluster.store_server.client()
    for tenant in (VICTIM, ATTACKER):
        await cluster.put_policy(store, TenantPolicy(TenantId(tenant), {c: ClassPolicy(4) for c in QosClass}))
    await asyncio.sleep(1.0)
    traffic = Traffic(cluster, seed)
    tasks = [asyncio.create_task(cluster.watch(), name="watch")]
    if attack is not None:
        tasks.append(asyncio.create_task(_attack(traffic, attack)))
    await asyncio.sleep(WARM_UP_S)
    victims: list[Call] = []
    async with asyncio.TaskGroup() as group:
        for i in range(STREAMS):
            group.create_task(_victim(cluster, traffic, victims, 0.1 * i))
    for task in tasks:
        assert not task.done(), task.exception()
        task.cancel()
    for call in victims:
        assert call.finished is not None, call.describe()
        assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED, call.describe()
    for call in traffic.calls:
        call.read_pause_s = 0.0  # from its next read on
    await traffic.all_ended(60.0)
    for call in traffic.calls:
        validate.check_call(call)
    validate.check_engines(cluster)
    return sorted(_ttft(call) for call in victims), traffic


async def _attack(traffic: Traffic, shape: Callable[[Call], None]) -> None:
    running: list[Call] = []
    while True:
        running = [call for call in running if call.ended_at is None]
        while len(running) < OUTSTANDING:
            call = traffic.plain(ATTACKER)
            call.qos_class, call.adapter, call.n, call.is_greedy = "interactive", "", 1, False
            shape(call)
            traffic.begin(call)
            running.append(call)
        await asyncio.sleep(REFILL_S)


async def _victim(cluster: Cluster, traffic: Traffic, calls: list[Call], begin_s: float) -> None:
    await asyncio.sleep(begin_s)
    until = cluster.loop.time() + MEASURED_S
    while cluster.loop.time() < until:
        call = traffic.plain(VICTIM)
        call.qos_class, call.adapter, call.n, call.max_tokens = "interactive", "", 1, 6
        call.prompt = [*SHARED_PREFIX, 100 + call.number % 100]
        traffic.begin(call)
        calls.append(call)
        next_at = cluster.loop.time() + PERIOD_S
        while call.ended_at is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(max(0.0, next_at - cluster.loop.time()))


def _ttft(call: Call) -> float:
    """To the first frame that says what the answer is; it may be empty."""
    frames = zip(call.frame_times, call.frames, strict=True)
    return next(at for at, frame in frames if frame.HasField("delta") or frame.HasField("finished")) - call.began_at


def p95(values: list[float]) -> float:
    return values[int(0.95 * (len(values) - 1))]


@functools.cache
def alone_p95() -> float:
    values, _ = run(ttfts(1, None), seed=1, limit_s=600.0).result
    return p95(values)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_neighbour_adds_a_quantum_at_most(attack: Callable[[Call], None]) -> None:
    values, traffic = run(ttfts(1, attack), seed=1, limit_s=600.0, max_events=5_000_000).result
    beside, alone = p95(values), alone_p95()
    print(f"{attack.__name__}: {1000 * alone:.0f} ms alone, {1000 * beside:.0f} ms beside, {len(values)} calls")
    assert beside <= alone + BOUND_S
    ends = {c.finished.outcome for c in traffic.calls if c.tenant == ATTACKER and c.finished is not None}
    if attack is readers_that_stop:
        assert common_pb2.OUTCOME_SLOW_READER in ends, "nobody was cut off: the attack shows nothing"
    elif attack is broken_adapters:
        assert ends == {common_pb2.OUTCOME_ADAPTER_FAILED}
