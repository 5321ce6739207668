"""The cluster under seeded traffic and faults: safety all the time, liveness once everything has healed.

A failing seed is shown with its faults; `pytest "tests/sim/test_cluster.py::test_chaos[seed 17]" --sim-seeds 18` is
that run again, event for event.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from manylora.v1 import common_pb2
from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_sim.fake_runner import reference_tokens
from manylora_sim.loop import SimRun, run

from tests.sim import books, validate
from tests.sim.cluster import (
    EOS,
    EOS_ONE_IN,
    LEAVING_ADAPTER,
    PARKED,
    SLOTS,
    STEP_S,
    TENANTS,
    VOCAB_SIZE,
    Cluster,
    adapters_of,
)
from tests.sim.faults import Faults
from tests.sim.traffic import Call, Traffic

CHAOS_S = 10.0
CALLS = 50
FAULTS = 10
"""While there are faults; why so many: docs/decisions/0025."""
HEALED_TOKENS = 12
"""What each adapter's call may have after healing: longer answers were a tenth of a seed's events."""
SETTLE_S = 8.0
"""After healing: time for elections, leases and reconnects, before new calls must all succeed."""
END_S = 60.0
"""Every call ends within this time after healing."""
REST_S = 12.0
"""Longer than any grant or pause is remembered."""
BEGUN_S = 0.5
"""For answers of which each takes a second to have begun."""
FREE_S = 0.3
"""For a worker to hear that an answer is not wanted any more, and to end its step."""


async def chaos(seed: int, log: list[str]) -> Traffic:
    cluster = Cluster(seed)
    await cluster.start()
    traffic = Traffic(cluster, seed)
    faults = Faults(cluster, seed)
    faults.log = log
    watching = asyncio.create_task(cluster.watch(), name="watch")
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(CHAOS_S, calls=CALLS))
        group.create_task(faults.run(CHAOS_S, faults=FAULTS))
    await faults.heal()
    await asyncio.sleep(SETTLE_S)
    billed = await books.mark(cluster)
    good = [(tenant, adapter) for tenant in TENANTS for adapter in ("", *adapters_of(tenant))]
    for tenant, adapter in [*good, *((tenant, LEAVING_ADAPTER) for tenant in cluster.removed_adapters)]:
        call = traffic.plain(tenant)
        call.adapter, call.max_tokens = adapter, min(call.max_tokens, HEALED_TOKENS)
        call.is_after_heal = True
        traffic.begin(call)
    await traffic.all_ended(END_S)
    await give_up_long_answers(cluster, traffic)
    await lose_a_worker(cluster, traffic, seed)
    validate.check_calls(cluster, traffic.calls)
    await asyncio.sleep(REST_S)
    assert not watching.done(), watching.exception()
    watching.cancel()
    validate.check_at_rest(cluster)
    books.check_billed_since(cluster, billed)
    for process in cluster.processes.values():
        await cluster.stop(process)
    await asyncio.sleep(5.0)
    validate.check_stopped(cluster)
    validate.check_engines(cluster)
    return traffic


async def give_up_long_answers(cluster: Cluster, traffic: Traffic) -> None:
    """One by its caller, one by its deadline, while nothing is wrong: both end at once, and leave the workers then."""
    gone, late = traffic.long("acme"), traffic.long("bolt")
    gone.cancel_after_frames, late.timeout_s = 2, 0.8
    for call in (gone, late):
        traffic.begin(call)
        await traffic.all_ended(END_S)
    await asyncio.sleep(FREE_S)
    assert gone.is_cancelled or gone.is_overloaded, gone.describe()
    assert late.is_overloaded or validate.is_cut_by_deadline(late), late.describe()
    assert not any(engine.runtime.view.running for engine in cluster.engines_up()), "a worker runs what nobody wants"


async def lose_a_worker(cluster: Cluster, traffic: Traffic, seed: int) -> None:
    """It is killed, seen or unseen, or stopped in order, while nothing else is wrong: what it ran goes on elsewhere."""
    calls = [traffic.long(tenant, n) for tenant, n in zip(TENANTS, (1, 3, 2), strict=False)]
    for call in calls:
        call.is_after_heal = True
        traffic.begin(call)
    await asyncio.sleep(BEGUN_S)
    names = sorted(cluster.names("worker"), key=lambda name: len(books.engine_of(cluster, name).runtime.view.running))
    process = cluster.processes[names[-1]]
    left = {call.number for call in calls if call.ended_at is None}
    if seed % 3 == 2:
        await cluster.stop(process)
    else:
        await cluster.kill(process, silently=seed % 3 == 1)
    await traffic.all_ended(END_S)
    resumed = [call for call in calls if call.finished is not None and call.finished.usage.resumed]
    assert resumed or len(left) < len(calls), "its streams did not go on elsewhere"
    await cluster.all_up()


def play(seed: int) -> SimRun[Traffic]:
    log: list[str] = []
    try:
        return run(chaos(seed, log), seed=seed, limit_s=600.0, max_events=2_000_000)
    except BaseException:
        print(f"seed {seed} fails; its faults:", *log, sep="\n  ")
        raise


@pytest.mark.all_but_each_nth_seed(10)  # these are played with quotas (test_quota_faults.py)
def test_chaos(sim_seed: int) -> None:
    play(sim_seed)


@pytest.mark.parametrize("sim_seed", [47, 53])
def test_a_seed_is_one_run(sim_seed: int) -> None:
    first, second = play(sim_seed), play(sim_seed)
    engines = first.result._cluster.engines
    assert sum(engine.core.stats().swaps_out for engine in engines) > 0, "no KV went to a host"
    assert (first.digest, first.events, first.virtual_s) == (second.digest, second.events, second.virtual_s)
    assert [c.describe() for c in first.result.calls] == [c.describe() for c in second.result.calls]


def test_without_faults_every_call_ends_as_it_should() -> None:
    async def main() -> None:
        cluster = Cluster(0)
        await cluster.start()
        traffic = Traffic(cluster, 0)

        most = 0

        async def watch_room() -> None:
            nonlocal most
            while True:
                for engine in cluster.engines:
                    there = engine.runtime.view.unfinished_sequences
                    assert there <= SLOTS + PARKED, "a worker got more than it takes"
                    most = max(most, there)
                await asyncio.sleep(0.001)

        watching = [asyncio.create_task(watch_room()), asyncio.create_task(cluster.watch())]
        await traffic.run(20.0, calls=200)
        await traffic.all_ended(END_S)
        assert not any(task.done() for task in watching)
        assert most > SLOTS, "nobody was parked: the seed shows less than it should"
        validate.check_calls(cluster, traffic.calls)
        outcomes: dict[int, int] = {}
        for call in traffic.calls:
            if call.finished is not None:
                outcomes[call.finished.outcome] = outcomes.get(call.finished.outcome, 0) + 1
            is_wrong = call.adapter in ("broken", "unknown") or call.tenant not in TENANTS
            assert call.error is None or call.timeout_s is not None or is_wrong or call.is_overloaded, call.describe()
        assert outcomes[common_pb2.OUTCOME_COMPLETED] > 100
        assert outcomes[common_pb2.OUTCOME_DEADLINE_EXCEEDED] > 0
        await asyncio.sleep(REST_S)
        validate.check_at_rest(cluster)
        validate.check_engines(cluster)

    run(main(), seed=0, limit_s=600.0)


def test_who_comes_to_workers_full_of_long_answers_has_its_first_token_within_some_steps() -> None:
    """The longest answers of one tenant are in every slot, and more of them wait; another's calls come one by one. None
    waits for an answer's end, and no token of the interrupted answers is lost, repeated or changed."""

    async def main() -> None:
        cluster = Cluster(5)
        await cluster.start()
        traffic = Traffic(cluster, 5)

        def call(tenant: str, number: int, max_tokens: int) -> Call:
            made = traffic.plain(tenant)
            made.adapter, made.n, made.qos_class, made.is_greedy = "", 1, "standard", False
            made.prompt, made.max_tokens, made.seed = [10 + number % 200, 7, 9], max_tokens, number
            return made

        long = [call("bolt", number, 140) for number in range(200) if _length(number) > 100][:30]
        assert len(long) == 30
        for each in long:
            traffic.begin(each)
        await asyncio.sleep(0.5)
        assert all(engine.core.stats().running_sequences == SLOTS for engine in cluster.engines)
        waits: list[float] = []
        for number in range(10):
            late = call("crux", 1000 + number, 4)
            traffic.begin(late)
            while late.ended_at is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            first = next(t for t, f in zip(late.frame_times, late.frames, strict=True) if f.HasField("delta"))
            waits.append(first - late.began_at)
        assert not any(each.ended_at for each in long[:3]), "the slots were free: this shows nothing"
        # An answer takes 100 steps and more. KV is short too, so a step may go by until somebody's blocks are free; a
        # step takes up to two STEP_S.
        assert max(waits) <= QUANTUM_TOKENS * 2 * STEP_S, waits
        await traffic.all_ended(END_S)
        validate.check_calls(cluster, traffic.calls)
        await asyncio.sleep(REST_S)
        validate.check_at_rest(cluster)
        validate.check_engines(cluster)

    run(main(), seed=5, limit_s=600.0)


def _length(number: int) -> int:
    """Of the answer that the test above gets."""
    tokens = reference_tokens(
        [10 + number % 200, 7, 9],
        None,
        number,
        0,
        140,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        eos_one_in=EOS_ONE_IN,
        stop_token_ids=[EOS],
    )
    return len(tokens)


def test_a_cancelled_call_frees_its_work_at_once() -> None:
    async def main() -> None:
        cluster = Cluster(1)
        await cluster.start()
        traffic = Traffic(cluster, 1)
        call = replace(traffic.plain("acme"), max_tokens=100, n=3, cancel_after_frames=4)
        traffic.begin(call)
        await traffic.all_ended(10.0)
        assert call.is_cancelled
        await asyncio.sleep(0.1)
        assert all(not engine.core.stats().requests for engine in cluster.engines)
        assert sum(engine.core.stats().generated_tokens for engine in cluster.engines) < 60

    run(main(), seed=1, limit_s=600.0)


def test_a_grant_of_a_leader_that_is_over_is_refused_and_another_given() -> None:
    """It reaches the worker after the next leader has."""

    async def main() -> None:
        cluster = Cluster(6, routers=1, workers=1)
        await cluster.start()
        await asyncio.sleep(1.0)
        traffic = Traffic(cluster, 6)
        cluster.network.partition("router0", "worker0", both_ways=False)
        call = traffic.plain("acme")
        traffic.begin(call)
        await asyncio.sleep(0.2)
        (leader,) = cluster.leaders()
        assert leader.debug_counters()["granted"] == 1
        process = next(p for p in cluster.processes.values() if p.app is leader)
        await cluster.stop(process)  # hands over at once, while the request is on its way
        await asyncio.sleep(0.5)
        (successor,) = cluster.leaders()
        assert successor.debug_counters()["workers"] == 1
        cluster.network.heal()
        await traffic.all_ended(20.0)
        (engine,) = cluster.engines
        assert engine.fence.num_refused == 1, "the seed shows less than it should"
        validate.check_engines(cluster)
        validate.check_calls(cluster, traffic.calls)
        assert call.finished is not None
        assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED

    run(main(), seed=6, limit_s=600.0)


def test_a_grant_that_was_lost_on_its_way_is_given_again() -> None:
    async def main() -> None:
        cluster = Cluster(2, routers=1, schedulers=1)
        await cluster.start()
        await asyncio.sleep(1.0)
        traffic = Traffic(cluster, 2)
        cluster.network.partition("scheduler0", "router0", both_ways=False)
        call = traffic.plain("acme")
        traffic.begin(call)
        await asyncio.sleep(0.5)
        (leader,) = cluster.leaders()
        assert leader.debug_counters()["granted"] == 1
        cluster.network.drop_connections("scheduler0", "router0")
        cluster.network.heal()
        healed_at = cluster.loop.time()
        await traffic.all_ended(10.0)
        validate.check_calls(cluster, traffic.calls)
        assert call.finished is not None
        assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert cluster.loop.time() - healed_at < 5.0

    run(main(), seed=2, limit_s=600.0)
