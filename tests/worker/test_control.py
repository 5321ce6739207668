"""The Control stream: what reports tell and when, commands, and the fencing of epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import Setbacks
from manylora_worker.hosting.engine import engine_limits
from manylora_worker.hosting.view import EnginePost, EngineView
from manylora_worker.kinds.api import AdapterTier
from manylora_worker.planning.step_planner import FlowSlots
from manylora_worker.serving.control import ControlSession

from tests.worker.worker_fakes import (
    MODEL,
    UID,
    Scheduler,
    collect,
    collect_rest,
    config,
    message,
    refused,
    request,
    running_worker,
)


def view_and_session() -> tuple[EngineView, ControlSession]:
    """Of an engine that does nothing."""
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), engine_limits(config()))
    view = EngineView(core.stats(), 8, lambda command: None)
    return view, ControlSession(view, sequence_slots=8, parked_sequences=0, kv_block_bytes=64)


async def test_reports_tell_all_that_happens() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        first = await scheduler.read()
        assert first.snapshot
        assert (first.sequence_slots, first.max_sequences, first.running_sequences) == (8, 8 + 64, 0)
        assert (first.kv_blocks_total, first.kv_blocks_free, first.block_size) == (4096, 4096, 16)
        assert first.kv_block_bytes == MODEL.kv_block_bytes
        call = asyncio.create_task(collect(worker.execute(message(n=2, adapter_uid=UID, max_tokens=60))))
        report = await scheduler.read_until(lambda r: bool(r.started))
        assert report.running_sequences == 2
        assert scheduler.running == {"r1": 2}
        await scheduler.read_until(lambda r: any(flow.slotted_sequences == 2 for flow in r.flows))
        await scheduler.read_until(lambda r: "r1" in r.finished_request_ids)
        last = scheduler.reports[-1]
        assert last.running_sequences == 0
        assert last.kv_blocks_free == 4096
        assert last.counters.generated_tokens == 120
        assert scheduler.adapters == {UID: worker_pb2.ADAPTER_TIER_DEVICE}
        assert scheduler.flows == {("acme", common_pb2.QOS_CLASS_STANDARD): (4, 120)}
        assert scheduler.running == {}
        assert scheduler.kv_blocks.get("acme", 0) == 0, "what it held is given back"
        await call
        assert len(scheduler.reports) < 40, "not one report a token"


async def test_reports_tell_what_tenants_hold_where_it_changed() -> None:
    view, session = view_and_session()
    told = []
    for held in ({"a": 3}, {"a": 4, "b": 1}, {"a": 4}, {}):
        view.kv_blocks = {TenantId(tenant): blocks for tenant, blocks in held.items()}
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        told.append({tenant.tenant_id: tenant.kv_blocks for tenant in report.tenants})
    assert told == [{"a": 3}, {"a": 4, "b": 1}, {"b": 0}, {"a": 0}]


async def test_reports_tell_what_befell_tenants_sequences_where_it_grew() -> None:
    limits = engine_limits(config())
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    sessions = [ControlSession(view, sequence_slots=8, parked_sequences=0, kv_block_bytes=64) for _ in range(2)]

    def post(**setbacks: Setbacks) -> EnginePost:
        grown = {TenantId(tenant): each for tenant, each in setbacks.items()}
        return EnginePost([], [], view.stats, {}, grown, {}, None, None, None)

    async def told(session: ControlSession) -> dict[str, tuple[int, ...]]:
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        return {s.tenant_id: (s.preemptions, s.swaps_out, s.evictions, s.recomputed_tokens) for s in report.setbacks}

    early, late = sessions
    view.take(post(a=Setbacks(1, 2, 3, 4), b=Setbacks(preemptions=1), c=Setbacks(evictions=1)))
    assert await told(early) == {"a": (1, 2, 3, 4), "b": (1, 0, 0, 0), "c": (0, 0, 1, 0)}
    assert await told(early) == {}
    view.take(post(c=Setbacks(evictions=2)))
    view.take(post(a=Setbacks(1, 2, 3, 9)))
    assert await told(early) == {"c": (0, 0, 2, 0), "a": (1, 2, 3, 9)}
    view.take(post())
    assert await told(early) == {}
    assert await told(late) == {"a": (1, 2, 3, 9), "b": (1, 0, 0, 0), "c": (0, 0, 2, 0)}


def test_what_came_is_told_with_what_its_first_steps_bring_and_what_went_at_once() -> None:
    async def main() -> None:
        _, session = view_and_session()
        now = asyncio.get_running_loop().time
        await session.next_report()

        async def told_after(*changes: Callable[[], None]) -> float:
            """Seconds from the last report to the next one, which tells of all that changed."""
            began = now()
            for change in changes:
                change()
            report = await session.next_report()
            assert report is not None
            assert len(report.started) + len(report.finished_request_ids) == len(changes)
            return now() - began

        def ends(name: str) -> Callable[[], None]:
            return lambda: session.ended(RequestId(name))

        def starts(name: str) -> Callable[[], None]:
            return lambda: session.started(request(name))

        assert await told_after(starts("r1")) == pytest.approx(0.01)
        assert await told_after(ends("r1")) == pytest.approx(0.002)
        assert await told_after(starts("r2"), ends("r0")) == pytest.approx(0.002), "the more urgent counts"
        assert await told_after(ends("r2"), starts("r3")) == pytest.approx(0.002)

    simulation.run(main(), seed=1)


def test_that_nothing_of_a_flow_waits_is_told_at_once_where_others_are_beside_it() -> None:
    """It may have another request granted then; one that is alone has room, or none."""

    async def main() -> None:
        view, session = view_and_session()
        now = asyncio.get_running_loop().time
        await session.next_report()

        async def told_after(**slots: int) -> float:
            """Seconds from the last report to the next one, when so many sequences of each tenant get slots."""
            began = now()
            counts = {(TenantId(t), QosClass.STANDARD): FlowSlots(count) for t, count in slots.items()}
            view.take(EnginePost((), (), view.stats, {}, {}, {}, None, None, counts))
            session.engine_changed()
            assert await session.next_report() is not None
            return now() - began

        view.open(request("a1", n=2))
        assert await told_after(acme=1) == pytest.approx(0.05)
        assert await told_after(acme=2) == pytest.approx(0.05), "it is alone"
        view.open(request("b1", n=2, tenant_id=TenantId("bolt")))
        assert await told_after(acme=2, bolt=1) == pytest.approx(0.05), "bolt has one that waits, acme had none before"
        assert await told_after(acme=2, bolt=2) == pytest.approx(0.002)
        assert await told_after(acme=1, bolt=2) == pytest.approx(0.05), "acme has one that waits again"
        assert await told_after(acme=2, bolt=1) == pytest.approx(0.002)

    simulation.run(main(), seed=1)


async def test_reports_tell_where_adapters_are_where_that_changed() -> None:
    view, session = view_and_session()
    host, device = AdapterTier.HOST, AdapterTier.DEVICE
    told = []
    for there in ({"a": host}, {"a": device, "b": host}, {"a": device}, {"a": device, "c": host}):
        view.adapters = {AdapterUid(uid): tier for uid, tier in there.items()}
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        told.append({adapter.adapter_uid: adapter.tier for adapter in report.adapters})
    host_tier, device_tier = worker_pb2.ADAPTER_TIER_HOST, worker_pb2.ADAPTER_TIER_DEVICE
    gone = worker_pb2.ADAPTER_TIER_UNSPECIFIED
    assert told == [{"a": host_tier}, {"a": device_tier, "b": host_tier}, {"b": gone}, {"c": host_tier}]


async def test_the_answer_and_the_counters_tell_cached_tokens() -> None:
    async with running_worker() as worker:
        prompt = list(range(1, 41))
        cached = []
        for i, (tenant, uid) in enumerate([("acme", ""), ("acme", ""), ("other", ""), ("acme", UID)]):
            asked = message(f"r{i}", tenant_id=tenant, adapter_uid=uid, prompt_token_ids=prompt, max_tokens=2)
            cached.append((await collect(worker.execute(asked))).finished.cached_prompt_tokens)
        assert cached == [0, 32, 0, 0]
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
        standard = common_pb2.QOS_CLASS_STANDARD
        assert scheduler.flows == {("acme", standard): (40 + 8 + 40, 6), ("other", standard): (40, 2)}
    async with running_worker(settings=config(prefix_cache_share=0.0)) as worker:
        for i in range(2):
            result = await collect(worker.execute(message(f"r{i}", prompt_token_ids=prompt)))
            assert result.finished.cached_prompt_tokens == 0


def test_counters_alone_are_told_every_50_ms_and_room_at_once() -> None:
    async def main() -> None:
        async with running_worker(step_s=0.002) as worker:
            stream = worker.execute(message(max_tokens=8000))
            await stream.read()
            scheduler = Scheduler(worker)
            await scheduler.hello(1)
            assert (await scheduler.read()).started[0].request_id == "r1"
            for _ in range(5):
                await scheduler.read()
            gaps = [b - a for a, b in zip(scheduler.times[1:], scheduler.times[2:], strict=False)]
            assert all(0.04 < gap < 0.06 for gap in gaps)
            tokens = [r.counters.generated_tokens for r in scheduler.reports]
            assert tokens == sorted(set(tokens))
            stream.cancel()
            began = asyncio.get_running_loop().time()
            await scheduler.read_until(lambda r: bool(r.finished_request_ids))
            assert scheduler.times[-1] - began < 0.02

    simulation.run(main(), seed=1)


async def test_prefetch_and_drain() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.send(prefetch=worker_pb2.PrefetchAdapter(adapter_uid=UID))
        await scheduler.read_until(lambda r: scheduler.adapters.get(UID) == worker_pb2.ADAPTER_TIER_DEVICE)
        running = worker.execute(message(max_tokens=50))
        await running.read()
        await scheduler.send(drain=worker_pb2.Drain())
        await scheduler.read_until(lambda r: r.draining)
        error = await refused(worker.execute(message("late")).read())
        assert error.code is Code.UNAVAILABLE
        assert "draining" in error.message
        await collect_rest(running)
        await scheduler.read_until(lambda r: "r1" in scheduler.reports[-1].finished_request_ids)


async def test_epochs_fence() -> None:
    async with running_worker() as worker:
        old, new = Scheduler(worker), Scheduler(worker)
        await old.hello(5)
        await old.read()
        await new.hello(6)
        assert (await new.read()).snapshot
        error = await refused(old.read())
        assert error.code is Code.FAILED_PRECONDITION
        late = Scheduler(worker)
        await late.hello(5)
        assert (await refused(late.read())).code is Code.FAILED_PRECONDITION
        error = await refused(worker.execute(message(epoch=5)).read())
        assert error.code is Code.FAILED_PRECONDITION
        await collect(worker.execute(message(epoch=6)))
        await collect(worker.execute(message(epoch=9)))
        again = Scheduler(worker)
        await again.hello(6)
        assert (await again.read()).snapshot


@pytest.mark.parametrize(
    ("commands", "field"),
    [
        ([{"drain": worker_pb2.Drain()}], "hello"),
        ([{}], "hello"),
        ([{"hello": worker_pb2.ControlHello(epoch=1)}, {"hello": worker_pb2.ControlHello(epoch=1)}], "command"),
        ([{"hello": worker_pb2.ControlHello(epoch=1)}, {}], "command"),
        (
            [{"hello": worker_pb2.ControlHello(epoch=1)}, {"prefetch": worker_pb2.PrefetchAdapter(adapter_uid="..")}],
            "prefetch.adapter_uid",
        ),
    ],
)
async def test_wrong_commands_end_the_stream_and_name_the_field(commands: list[dict[str, Any]], field: str) -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        for command in commands:
            await scheduler.send(**command)

        async def read_all() -> None:
            while True:
                await scheduler.read()

        error = await refused(read_all())
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, field)


async def test_a_scheduler_that_closes_its_side_ends_the_stream_in_order() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
        await scheduler.stream.close_send()
        async with asyncio.timeout(60):
            while await scheduler.stream.read() is not None:
                pass


async def test_a_lost_scheduler_changes_nothing_for_what_runs() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        call = asyncio.create_task(collect(worker.execute(message(max_tokens=100))))
        await scheduler.read_until(lambda r: bool(r.started))
        scheduler.stream.cancel()
        assert (await call).finished.outcome == common_pb2.OUTCOME_COMPLETED
        again = Scheduler(worker)
        await again.hello(1)
        assert (await again.read()).counters.generated_tokens == 100
