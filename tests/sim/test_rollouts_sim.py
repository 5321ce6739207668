"""Rollouts that judge themselves on the whole cluster, while leaders, routers and everything at once are killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from manylora_router.guard.trials import Trials
from manylora_scheduler.serving.rollouts import Rollouts
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.tenancy import trial
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line
from manylora_sim.loop import run

from tests.sim.cluster import BROKEN_ADAPTER, LEASE_TTL_S, Cluster, digest_of_adapter
from tests.sim.traffic import Traffic

TENANT, NAME = "crux", "crux-0"
PLAN = trial.Plan((20, 50), 40, 300.0, "t")
CALLS_PER_S = 12
MOST_S = 90.0
MOST_FAILED = 30
"""Of a version that always fails, refusals by its circuit included."""


class Scene:
    """One rollout of version 2, under steady calls."""

    def __init__(self, seed: int, canary: str) -> None:
        self.cluster = Cluster(seed)
        self.traffic = Traffic(self.cluster, seed)
        self._canary = digest_of_adapter(TENANT, canary)

    async def begin(self) -> None:
        await self.cluster.start()
        line = Line(AdapterVersion(1, digest_of_adapter(TENANT, NAME), 8, 1, ("q_proj",), 0.0))
        line, _ = line.add(AdapterVersion(0, self._canary, 8, 1, ("q_proj",), 0.0), 0.0)
        line = line.roll_out(2, 0, "request", "salt", self.cluster.clock.now_unix_s(), PLAN)
        record = AdapterRecord.of(TENANT, NAME, line)
        store = self.cluster.store_server.client()
        await store.put(record.key, record.to_json())
        await store.close()

    @property
    def line(self) -> Line:
        stored = self.cluster.store_server.get(keys.adapter(TENANT, NAME))
        assert stored is not None
        return AdapterRecord.stored(stored).line

    async def call(self) -> None:
        """Until there is no rollout."""
        while self.line.rollout is not None:
            call = self.traffic.plain(TENANT)
            call.adapter, call.prompt, call.max_tokens, call.n = NAME, call.prompt[:8], 2, 1
            self.traffic.begin(call)
            await asyncio.sleep(1 / CALLS_PER_S)

    async def disturb(self) -> None:
        cluster = self.cluster
        await asyncio.sleep(3.0)
        [leader] = [p for p in cluster.processes.values() if p.app in cluster.leaders()]
        await cluster.kill(leader)
        await cluster.all_up()
        await asyncio.sleep(3.0)
        await cluster.kill(cluster.processes["router0"])
        await cluster.all_up()
        await asyncio.sleep(4.0 + LEASE_TTL_S)
        for process in cluster.processes.values():
            await cluster.kill(process)
        await cluster.all_up()

    async def end(self) -> None:
        await self.traffic.all_ended(60.0)
        await asyncio.sleep(5.0)
        for process in self.cluster.processes.values():
            await self.cluster.stop(process)


async def play(seed: int, canary: str, *, is_disturbed: bool) -> Scene:
    scene = Scene(seed, canary)
    await scene.begin()
    async with asyncio.timeout(MOST_S), asyncio.TaskGroup() as group:
        group.create_task(scene.call())
        if is_disturbed:
            group.create_task(scene.disturb())
    line = scene.line
    await scene.end()
    assert scene.line == line, "what was decided stays"
    return scene


def good(seed: int) -> None:
    scene = run(play(seed, "crux-1", is_disturbed=True), seed=seed, limit_s=300).result
    line = scene.line
    assert line.in_force.number == 2, line.events[-1]
    told = [(event.change, event.percent) for event in line.events]
    assert told == [("add", 0), ("rollout", 20), ("rollout", 50), ("promote", 0)], "each step is taken once"
    assert all(" gave no alarm" in event.why for event in line.events[2:])
    counted = [int(number) for event in line.events[2:] for number in re.findall(r"(\d+) (?:requests )?of", event.why)]
    assert sum(counted) <= len(scene.traffic.calls), "no request counts twice"


def bad(seed: int) -> None:
    scene = run(play(seed, BROKEN_ADAPTER, is_disturbed=False), seed=seed, limit_s=300).result
    line = scene.line
    assert (line.in_force.number, line.events[-1].change) == (1, "rollback")
    assert line.events[-1].why.startswith("errors: 100.0% of "), line.events[-1]
    failed = [call for call in scene.traffic.calls if call.error is not None]
    assert len(failed) <= MOST_FAILED, "it is found soon"


@pytest.mark.parametrize("seed", range(2))
def test_a_good_version_is_promoted_whoever_is_killed(seed: int) -> None:
    good(seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_version_that_fails_goes_back(seed: int) -> None:
    bad(seed)


def _all_are_stable(original: Any) -> Any:
    def of(self: Any, tenant: Any, adapter: Any) -> Any:
        counts = original(self, tenant, adapter)
        return None if counts is None else self._counts[tenant, adapter.parts[0].name, adapter.trial][1]

    return of


def _counts_stay(original: Any) -> Any:
    def take(self: Any) -> Any:
        counts = self._counts
        found = original(self)
        self._counts = counts
        return found

    return take


def _new_trial_each_time(original: Any) -> Any:
    def of(self: Any, tried: Any, rollout: Any, plan: Any, now: float) -> Any:
        tried.trial = None
        return original(self, tried, rollout, plan, now)

    return of


def _failures_are_excused(original: Any) -> Any:
    def ended(self: Any, tenant: Any, adapter: Any, outcome: Any) -> Any:
        if not outcome.has_failed:
            original(self, tenant, adapter, outcome)

    return ended


def _alarm_promotes(original: Any) -> Any:
    def verdict(self: Any, to: int, in_force: int, now_unix_s: float) -> Any:
        found = original(self, to, in_force, now_unix_s)
        is_back = found is not None and found.decision is trial.Decision.ROLLBACK
        return trial.Verdict(trial.Decision.PROMOTE, "?", "?") if is_back else found

    return verdict


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("owner", "attribute", "make"),
    [
        (Trials, "_of", _all_are_stable),
        (Trials, "take", _counts_stay),
        (Trials, "ended", _failures_are_excused),
        (Rollouts, "_trial", _new_trial_each_time),
        (trial.Trial, "verdict", _alarm_promotes),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, attribute: str, make: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))

    def both() -> None:
        bad(0)
        good(0)

    with pytest.raises((AssertionError, TimeoutError, ExceptionGroup)):
        both()
