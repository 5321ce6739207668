"""Who leads, and what the next leader finds: the scheduler's shell in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import SchedulerRecord, WorkerRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.fairness.seam import TAG_SCALE

from tests.scheduler.helpers import flow
from tests.scheduler.scripted_cluster import Cluster, ScriptedRouter, play


def test_a_standby_refuses_and_takes_over_with_a_higher_epoch() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0")
        await cluster.leader()
        second = await cluster.scheduler("s1")
        worker = await cluster.worker("w0", slots=1)
        with pytest.raises(RpcError) as caught:
            await cluster.router(second)
        assert caught.value.code is Code.UNAVAILABLE
        assert "not the leader" in caught.value.message
        router = await cluster.router(first)
        await router.enqueue("a")
        await router.answer()
        worker.begin("a")
        await first.stop()
        cluster.apps.remove(first)
        with pytest.raises(RpcError) as caught:
            await router.answer()
        assert caught.value.code is Code.UNAVAILABLE
        assert await cluster.leader() is second
        record = await cluster.store.get(keys.SCHEDULER_LEADER)
        assert record is not None
        assert SchedulerRecord.from_json(record.value).address == second.address
        again = await cluster.router(second)
        assert again.epoch > router.epoch
        await again.enqueue("b")
        with pytest.raises(TimeoutError):
            await again.answer(1.0)  # a still runs, as the worker told the new leader
        assert worker.epochs == [router.epoch, again.epoch]

    play(scenario)


def test_a_leader_that_is_cut_off_from_the_store_leads_until_a_worker_obeys_another() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0")
        await cluster.leader()
        second = await cluster.scheduler("s1")
        worker = await cluster.worker("w0")
        router = await cluster.router(first)
        first._store.set_reachable(False)  # type: ignore[attr-defined]
        cut_at = asyncio.get_running_loop().time()
        with pytest.raises(RpcError) as caught:
            await router.answer(10.0)
        assert caught.value.code is Code.UNAVAILABLE
        assert asyncio.get_running_loop().time() - cut_at <= SchedulerConfig.lease_ttl_s + 0.6
        assert worker.epochs[-1] > router.epoch
        assert await cluster.leader(other_than=first) is second
        assert first.term is None or not first.term.is_leading
        first._store.set_reachable(True)  # type: ignore[attr-defined]
        await asyncio.sleep(5)
        assert first.term is None

    play(scenario)


def test_a_leader_grants_on_while_the_store_is_away() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        worker = await cluster.worker("w0", slots=1)
        router = await cluster.router(app)
        peer = await cluster.peer("late")
        cluster.store_server.set_up(False)
        began_at = asyncio.get_running_loop().time()
        for i in range(40):
            await router.enqueue(f"r{i}")
            await router.answer(0.1)
            worker.begin(f"r{i}")
            await asyncio.sleep(0.2)
            worker.end(f"r{i}")
            await router.close(f"r{i}")
        assert asyncio.get_running_loop().time() - began_at > 8
        late = await ScriptedRouter.connect(peer, app.address, "late")
        await late.enqueue("late")
        await late.answer(0.5)
        cluster.store_server.set_up(True)
        await asyncio.sleep(5)
        assert worker.epochs == [router.epoch]

    play(scenario)


@pytest.mark.parametrize("planned", [True, False])
def test_the_next_leader_has_the_last_ones_clock(planned: bool) -> None:
    """The store has the clock as of the last second or, where the leader was stopped, as of its end; the workers'
    counters have the rest."""

    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0", standard_queue_ms=60_000.0)  # nobody gets turns
        await cluster.leader()
        second = await cluster.scheduler("s1", standard_queue_ms=60_000.0)
        worker = await cluster.worker("w0", slots=1)
        router = await cluster.router(first)
        for request_id in ("a", "b", "c"):
            await router.enqueue(request_id)
        assert (await router.answer()).request_id == "a"
        worker.begin("a")
        worker.compute(1_000)
        await asyncio.sleep(2.5)
        worker.compute(500)
        await asyncio.sleep(0.1)
        assert first.term is not None
        queue = first.term.core._queue
        tag = queue.tag_of(flow())
        assert tag > 2 * 1_500 * TAG_SCALE // 2 - TAG_SCALE
        if planned:
            await first.stop()
            cluster.apps.remove(first)
        else:
            first._store.set_reachable(False)  # type: ignore[attr-defined]
        worker.output_tokens += 77  # done while nobody led
        assert await cluster.leader(other_than=first) is second
        router = await cluster.router(second)
        for request_id in ("b", "c"):
            await router.enqueue(request_id)
        await asyncio.sleep(1.0)
        assert second.term is not None
        assert not second.term.core.is_restoring
        queue = second.term.core._queue
        assert queue.tag_of(flow()) == tag + 2 * 77 * (TAG_SCALE // 2)
        assert queue.virtual_time <= queue.tag_of(flow())
        if not planned:
            first._store.set_reachable(True)  # type: ignore[attr-defined]
            await asyncio.sleep(5)
        worker.end("a")
        assert (await router.answer()).request_id == "b"

    play(scenario)


def test_a_worker_that_comes_back_in_time_has_the_facts_of_its_new_life() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        worker = await cluster.worker("w0")
        stored = await cluster.store.get(keys.worker("w0"))
        assert stored is not None
        await asyncio.sleep(1)
        record = replace(WorkerRecord.from_json(stored.value), max_context_tokens=5000, merge_problem="quantized")

        def facts() -> list[tuple[int, bool]]:
            assert app.term is not None
            return [(each.max_context_tokens, each.can_merge) for _, each in app.term.pools.workers]

        before = facts()
        await cluster.store.put(stored.key, record.to_json())
        await asyncio.sleep(1)
        assert facts() == before, "the same process"
        await cluster.store.put(stored.key, replace(record, started_unix_s=5.0).to_json())
        await asyncio.sleep(1)
        assert facts() == [(5000, False)]
        assert len(worker.epochs) == 2

    play(scenario)
