"""Quotas under kills, pauses, partitions and changes of leaders: no flow ever gets more than its contract."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from manylora.v1 import common_pb2
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy, TenantQuotas, TokenRate
from manylora_sim.loop import run

from tests.sim import books, validate
from tests.sim.cluster import Cluster
from tests.sim.faults import Faults
from tests.sim.traffic import Call, Traffic

TENANT = "acme"
RATE, BURST = 60, 120
CHAOS_S = 10.0
BURSTS = 18
SETTLE_S = 8.0
END_S = 60.0
REST_S = 14.0
"""Longer than the leases of an absent router are kept."""
EACH_NTH = 10
"""Of the seeds; test_cluster.py plays the others."""


async def contended(seed: int, log: list[str], *, num_faults: int) -> tuple[Traffic, int]:
    """Most calls are the bounded tenant's, of all classes: about three times what its buckets give."""
    cluster = Cluster(seed, routers=3)
    cluster.is_thorough = True
    await cluster.start()
    cluster.bounded_tenants[TENANT] = None
    classes = {c: ClassPolicy(1, TokenRate(RATE, BURST)) for c in QosClass}
    policy = TenantPolicy(TenantId(TENANT), classes, quotas=TenantQuotas(requests_per_s=40, concurrency=30))
    await cluster.put_policy(cluster.store_server.client(), policy)
    await asyncio.sleep(1.0)
    traffic = Traffic(cluster, seed)
    faults = Faults(cluster, seed)
    faults.log = log
    watching = asyncio.create_task(cluster.watch(), name="watch")

    async def flood() -> None:
        for _ in range(BURSTS):
            for _ in range(6):
                traffic.begin(traffic.plain(TENANT))
            await asyncio.sleep(CHAOS_S / BURSTS)

    async with asyncio.TaskGroup() as group:
        group.create_task(flood())
        group.create_task(traffic.run(CHAOS_S, calls=28))
        group.create_task(faults.run(CHAOS_S, faults=num_faults))
    await faults.heal()
    await asyncio.sleep(SETTLE_S)
    billed = await books.mark(cluster)
    for qos_class in QosClass:
        call = traffic.plain(TENANT)
        call.qos_class, call.prompt, call.max_tokens, call.n = qos_class.value, [5, 6, 7], 4, 1
        call.is_after_heal = True
        traffic.begin(call)
    await traffic.all_ended(END_S)
    validate.check_calls(cluster, traffic.calls)
    total = 0
    for qos_class in QosClass:
        mine = [c for c in traffic.calls if c.tenant == TENANT and (c.qos_class or "standard") == qos_class.value]
        # All buckets begin empty, those of the first term after time 0: there is not even a burst to add. But two
        # leaders fill two (a seed had 0.34 tokens too many: two led for 0.2 s, after a lease was taken away).
        burst = math.ceil(RATE * cluster.most_of_two_leaders_s)
        total += validate.check_contract(mine, rate=RATE, burst=burst, since=0.0)
    await asyncio.sleep(REST_S)
    assert not watching.done(), watching.exception()
    watching.cancel()
    validate.check_at_rest(cluster)
    books.check_billed_since(cluster, billed)
    for process in cluster.processes.values():
        await cluster.stop(process)
    await asyncio.sleep(5.0)
    validate.check_stopped(cluster)
    return traffic, total


def _cut_or_refused(calls: list[Call]) -> int:
    return sum(
        call.error is not None and bool(call.error.breaches) and call.tenant == TENANT and not call.is_cancelled
        for call in calls
    )


def play(seed: int) -> None:
    log: list[str] = []
    try:
        run(contended(seed, log, num_faults=10), seed=seed, limit_s=600.0, max_events=2_000_000)
    except BaseException:
        print(f"seed {seed} fails; its faults:", *log, sep="\n  ")
        raise


@pytest.mark.each_nth_seed(EACH_NTH)
def test_quotas_hold_under_faults(sim_seed: int) -> None:
    play(sim_seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_contract_is_met_and_nobody_else_is_bounded(seed: int) -> None:
    traffic, total = run(contended(seed, [], num_faults=0), seed=seed, limit_s=600.0, max_events=2_000_000).result
    assert _cut_or_refused(traffic.calls) > 10, "the load was too small to meet the quotas"
    assert total > 0.7 * 3 * RATE * CHAOS_S
    for call in traffic.calls:
        if call.tenant != TENANT:
            assert call.error is None or not call.error.breaches, call.describe()
        elif call.finished is not None and call.finished.outcome == common_pb2.OUTCOME_QUOTA_EXHAUSTED:
            assert call.error is not None
            assert call.error.retry_after_s is not None


CONTRACT_RATE, CONTRACT_BURST = 150, 300
CONTRACT_S = 90.0


@pytest.mark.wide
@pytest.mark.each_nth_seed(200)
def test_a_contract_at_eight_routers_is_kept_and_used_while_leaders_restart(sim_seed: int) -> None:
    """Twice the contract is asked for, at eight routers. The leader restarts every 30 s, and now and then one to three
    routers are cut off from it for 3 s, in one direction or both."""

    async def main() -> None:
        cluster = Cluster(sim_seed, routers=8, workers=4)
        await cluster.start()
        cluster.bounded_tenants[TENANT] = None
        classes = {c: ClassPolicy(1) for c in QosClass}
        classes[QosClass.STANDARD] = ClassPolicy(1, TokenRate(CONTRACT_RATE, CONTRACT_BURST))
        await cluster.put_policy(cluster.store_server.client(), TenantPolicy(TenantId(TENANT), classes))
        await asyncio.sleep(1.0)
        traffic = Traffic(cluster, sim_seed)
        rng = random.Random(f"{sim_seed}/contract")
        began_at = cluster.loop.time()
        leased: list[tuple[float, int]] = []
        """What leases held, from time to time."""

        async def demand() -> None:
            while cluster.loop.time() < began_at + CONTRACT_S:
                call = traffic.plain(TENANT)
                call.qos_class, call.n = "standard", 1
                traffic.begin(call)
                await asyncio.sleep(rng.expovariate(2 * CONTRACT_RATE / 38))

        async def count_leases() -> None:
            while True:
                for app in cluster.leaders():
                    assert app.term is not None
                    views = app.term.quotas.authority.views(cluster.loop.time())
                    tokens = sum(view.leased_tokens for view in views if view.flow.tenant_id == TENANT)
                    leased.append((cluster.loop.time(), tokens))
                await asyncio.sleep(0.05)

        async def restart_leaders() -> None:
            for _ in range(2):
                await asyncio.sleep(CONTRACT_S / 3)
                leader = cluster.leaders()[0]
                process = next(p for p in cluster.processes.values() if p.app is leader)
                await cluster.stop(process)
                cluster.launch(process)

        async def cut_off() -> None:
            while cluster.loop.time() < began_at + CONTRACT_S - 10:
                await asyncio.sleep(rng.uniform(4.0, 8.0))
                leader = next(iter(cluster.leaders()), None)
                name = next((p.name for p in cluster.processes.values() if p.app is leader), None)
                if leader is None or name is None:
                    continue
                for router in rng.sample(cluster.names("router"), rng.randint(1, 3)):
                    cluster.network.partition(router, name, both_ways=rng.random() < 0.5)
                await asyncio.sleep(3.0)
                cluster.network.heal()

        counting = asyncio.create_task(count_leases())
        async with asyncio.TaskGroup() as group:
            for work in (demand, restart_leaders, cut_off):
                group.create_task(work())
        wanted = sum(len(call.prompt) + len(call.reference(0)) for call in traffic.calls)
        assert 1.8 < wanted / (CONTRACT_RATE * CONTRACT_S) < 2.3, "the load is not twice the contract"
        given = validate.deliveries(traffic.calls)
        used = sum(tokens for at, tokens in given if at <= began_at + CONTRACT_S)
        await traffic.all_ended(END_S)
        counting.cancel()
        validate.check_calls(cluster, traffic.calls)
        validate.check_contract(traffic.calls, rate=CONTRACT_RATE, burst=0, since=0.0)
        validate.check_windows(traffic.calls, leased, rate=CONTRACT_RATE, burst=CONTRACT_BURST)
        assert used >= 0.97 * CONTRACT_RATE * CONTRACT_S, f"{used} tokens of {CONTRACT_RATE * CONTRACT_S:.0f} were used"

    run(main(), seed=sim_seed, limit_s=600.0, max_events=4_000_000)
