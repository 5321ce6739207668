"""The leader's judgement: what routers told becomes one change of the record, by whoever leads, once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from manylora.v1 import scheduler_pb2
from manylora_scheduler.serving.rollouts import FORGET_S, JUDGE_S, SAVE_S, Rollouts
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import StoreUnavailable, TxnResult
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.telemetry import Telemetry
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line
from manylora_shared.tenancy.trial import LEAST_STEP_S, MAX_TRIALS, Plan
from manylora_sim.clock import FakeClock
from manylora_sim.loop import run
from manylora_sim.store import MemoryStore, MemoryStoreServer

Counts = scheduler_pb2.VersionCounts


class Rig:
    """One record with a rollout from version 1 to 2, and leaders of one store."""

    def __init__(self) -> None:
        self.server = MemoryStoreServer(random.Random(1))
        self.store: MemoryStore = self.server.client()
        self.clock = FakeClock()
        self.telemetry = Telemetry.recording("scheduler")
        self.tasks: list[asyncio.Task[None]] = []

    async def roll_out(self, *steps: int, min_requests: int = 50, limit_s: float = 1e4, trial: str = "t") -> None:
        line = Line(AdapterVersion(1, "one", 8, 1, ("q",), 0.0))
        line, _ = line.add(AdapterVersion(0, "two", 8, 1, ("q",), 0.0), 0.0)
        plan = Plan(steps, min_requests, limit_s, trial)
        line = line.roll_out(2, 0, "request", "salt", self.clock.now_unix_s(), plan)
        await self.put(line)

    async def put(self, line: Line) -> None:
        record = AdapterRecord.of("acme", "up", line)
        await self.store.put(record.key, record.to_json())

    async def line(self) -> Line:
        stored = await self.store.get(keys.adapter("acme", "up"))
        assert stored is not None
        return AdapterRecord.stored(stored).line

    async def lead(self) -> Rollouts:
        epoch = await self.store.put(keys.SCHEDULER_LEADER, b"s")
        rollouts = Rollouts(self.server.client(), epoch, self.telemetry, self.clock)
        self.tasks.append(asyncio.create_task(rollouts.run()))
        return rollouts

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        for each in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert isinstance(each, asyncio.CancelledError), each


def simulate(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def scenario() -> None:
        rig = Rig()
        try:
            await test(rig)
        finally:
            await rig.end()

    run(scenario(), seed=1)


def tell(rollouts: Rollouts, canary: Counts, stable: Counts, *, trial: str = "t", name: str = "up") -> None:
    message = scheduler_pb2.TrialCounts(tenant_id="acme", name=name, trial=trial, canary=canary, stable=stable)
    rollouts.take(message, asyncio.get_running_loop().time())


def test_it_steps_and_promotes_and_says_why() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10, 50)
        rollouts = await rig.lead()
        for _ in range(2):  # of two routers
            tell(rollouts, Counts(completed=30), Counts(completed=300))
        await asyncio.sleep(1.5 * JUDGE_S)
        line = await rig.line()
        assert line.rollout is not None
        assert line.rollout.percent == 10, "scores are still to come"
        rig.clock.advance(LEAST_STEP_S)
        await asyncio.sleep(1.5 * JUDGE_S)
        line = await rig.line()
        assert line.rollout is not None
        assert (line.rollout.percent, line.in_force.number) == (50, 1)
        assert line.events[-1].why.startswith("60 requests of version 2 and 600 of version 1 at 10 % gave no alarm")
        tell(rollouts, Counts(completed=60), Counts(completed=60))
        rig.clock.advance(LEAST_STEP_S)
        await asyncio.sleep(1.5 * JUDGE_S)
        line = await rig.line()
        assert (line.rollout, line.in_force.number) == (None, 2)
        assert [(e.change, e.percent) for e in line.events] == [
            ("add", 0),
            ("rollout", 10),
            ("rollout", 50),
            ("promote", 0),
        ]
        assert len(rollouts) == 0
        await asyncio.sleep(5 * JUDGE_S)
        assert await rig.line() == line

    simulate(test)


def test_a_bad_version_goes_back_and_late_counts_change_nothing() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(1)
        rollouts = await rig.lead()
        tell(rollouts, Counts(failed=12), Counts(completed=300))
        await asyncio.sleep(1.5 * JUDGE_S)
        line = await rig.line()
        assert (line.rollout, line.in_force.number, line.events[-1].change) == (None, 1, "rollback")
        assert line.events[-1].why.startswith("errors: 100.0% of 12 requests failed with version 2, 0.0% of 300")
        tell(rollouts, Counts(failed=12), Counts(completed=300))
        await asyncio.sleep(1.5 * JUDGE_S)
        assert await rig.line() == line
        assert len(rollouts) == 0

    simulate(test)


def test_a_next_leader_goes_on_from_what_was_saved() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10, min_requests=100)
        first = await rig.lead()
        tell(first, Counts(completed=60), Counts(completed=60))
        await asyncio.sleep(SAVE_S + 1.5 * JUDGE_S)
        tell(first, Counts(completed=30), Counts(completed=30))
        await asyncio.sleep(1.5 * JUDGE_S)  # judged, and not saved
        rig.clock.advance(LEAST_STEP_S)
        revision = (await rig.store.list(keys.ADAPTERS)).kvs[0].mod_revision
        second = await rig.lead()
        for leader in (first, second):
            tell(leader, Counts(completed=20), Counts(completed=20))
        await asyncio.sleep(1.5 * JUDGE_S)
        assert (await rig.store.list(keys.ADAPTERS)).kvs[0].mod_revision == revision, (
            "who does not lead decides nothing"
        )
        tell(second, Counts(completed=20), Counts(completed=20))
        await asyncio.sleep(JUDGE_S)
        line = await rig.line()
        assert line.in_force.number == 2
        assert line.events[-1].why.startswith("100 requests")

    simulate(test)


def test_people_come_first_and_end_the_trial() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10)
        rollouts = await rig.lead()
        tell(rollouts, Counts(completed=40), Counts(completed=40))
        await asyncio.sleep(1.5 * JUDGE_S)
        line = (await rig.line()).roll_out(2, 33, "request", "salt", 9.0)
        await rig.put(line)
        tell(rollouts, Counts(failed=90), Counts(completed=90))
        await asyncio.sleep(3 * JUDGE_S)
        assert await rig.line() == line
        await rig.roll_out(10, trial="again")
        tell(rollouts, Counts(completed=40), Counts(completed=40), trial="again")
        await asyncio.sleep(3 * JUDGE_S)
        again = (await rig.line()).rollout
        assert again is not None
        assert again.percent == 10, "it begins from nothing"

    simulate(test)


def test_a_bug_in_one_judgement_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10, limit_s=30.0)
        rollouts = await rig.lead()
        tell(rollouts, Counts(), Counts(), name="broken")
        tell(rollouts, Counts(), Counts())
        get = rollouts._store.get

        async def broken(key: str) -> Any:
            if "broken" in key:
                raise KeyError("unforeseen")
            return await get(key)

        rollouts._store.get = broken  # type: ignore[method-assign]
        await asyncio.sleep(2 * JUDGE_S)
        assert not rig.tasks[0].done()
        assert len(rollouts) == 1, "the broken one is begun anew with what is told next"
        rig.clock.advance(30.0)
        await asyncio.sleep(2 * JUDGE_S)
        assert (await rig.line()).rollout is None
        assert "unforeseen" in caplog.text

    simulate(test)


def test_without_requests_time_runs_out() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10, limit_s=30.0)
        rollouts = await rig.lead()
        for seconds in (29.0, 1.0):
            assert (await rig.line()).rollout is not None
            rig.clock.advance(seconds)
            tell(rollouts, Counts(), Counts())
            await asyncio.sleep(2 * JUDGE_S)
        line = await rig.line()
        assert (line.rollout, line.events[-1].change) == (None, "rollback")
        assert line.events[-1].why.startswith("there were 0 requests of version 2")

    simulate(test)


def test_a_decision_whose_answer_was_lost_is_made_once() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10, 20, 30, min_requests=50)
        store = rig.server.client()
        rollouts = Rollouts(store, await rig.store.put(keys.SCHEDULER_LEADER, b"s"), rig.telemetry, rig.clock)
        rig.tasks.append(asyncio.create_task(rollouts.run()))
        tell(rollouts, Counts(completed=60), Counts(completed=60))
        rig.clock.advance(LEAST_STEP_S)
        await asyncio.sleep(0.9 * JUDGE_S)
        txn, lost = store.txn, 0

        async def losing(*arguments: Any) -> TxnResult:
            nonlocal lost
            await txn(*arguments)
            lost += 1
            raise StoreUnavailable("the answer is lost")

        store.txn = losing  # type: ignore[method-assign]
        await asyncio.sleep(JUDGE_S)
        store.txn = txn  # type: ignore[method-assign]
        await asyncio.sleep(4 * JUDGE_S)
        line = await rig.line()
        assert lost == 1
        assert line.rollout is not None
        assert line.rollout.percent == 20, "the same requests take no second step"

    simulate(test)


def test_the_store_may_be_away_and_trials_are_bounded() -> None:
    async def test(rig: Rig) -> None:
        await rig.roll_out(10)
        rollouts = await rig.lead()
        rig.server.set_up(False)
        tell(rollouts, Counts(failed=12), Counts(completed=300))
        await asyncio.sleep(3 * JUDGE_S)
        rig.server.set_up(True)
        await asyncio.sleep(5 * JUDGE_S)
        assert (await rig.line()).events[-1].change == "rollback"
        for i in range(MAX_TRIALS + 9):
            tell(rollouts, Counts(), Counts(), name=f"n{i}")
        tell(rollouts, Counts(), Counts(), name="../x")
        assert len(rollouts) == MAX_TRIALS
        await asyncio.sleep(2 * JUDGE_S)
        assert len(rollouts) == 0
        await rig.roll_out(10)
        tell(rollouts, Counts(), Counts())
        await asyncio.sleep(FORGET_S + 3 * JUDGE_S)
        assert len(rollouts) == 0

    simulate(test)
