"""Rollouts that judge themselves, simulated: how often equal versions raise an alarm, and how soon worse ones do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line
from manylora_shared.tenancy.slo import bucket_of
from manylora_shared.tenancy.trial import (
    ALPHA,
    MIN_REQUESTS,
    STEP_LIMIT_S,
    STEPS,
    Decision,
    Doubt,
    Plan,
    Progress,
    Trial,
    Verdict,
    VersionCounts,
)

PLAN = Plan(STEPS, MIN_REQUESTS, STEP_LIMIT_S, "t")
RATE = 1_000  # requests in a second


@dataclass(frozen=True)
class Behaviour:
    fails: float = 0.02
    cut: float = 0.2
    slower: float = 1.0
    slower_token: float = 1.0
    liked: float = 0.8


GOOD = Behaviour()
BAD = {
    "fails always": (Behaviour(fails=1.0), "errors", 25),
    "fails often": (Behaviour(fails=0.2), "errors", 150),
    "slow to begin": (Behaviour(slower=2.0), "first_token", 100),
    "slow": (Behaviour(slower_token=1.5), "token_time", 150),
    "cut": (Behaviour(cut=0.6), "cut", 150),
    "disliked": (Behaviour(liked=0.3), "feedback", 500),  # a fifth gives feedback
}


def drawn(rng: np.random.Generator, count: int, share: float) -> int:
    return int(rng.binomial(count, share))


def spread(rng: np.random.Generator, count: int, median_ms: float) -> dict[int, int]:
    """Log-normal times, by bucket; of at most 60 of them."""
    times = median_ms * np.exp(rng.normal(0.0, 0.4, min(count, 60)))
    return Counter(bucket_of(float(each)) for each in times)


def counted(rng: np.random.Generator, how: Behaviour, requests: int, load: float) -> VersionCounts:
    failed = drawn(rng, requests, how.fails)
    completed = requests - failed
    warm = drawn(rng, completed, 0.5)
    votes = drawn(rng, completed, 0.2)
    up = drawn(rng, votes, how.liked)
    return VersionCounts(
        completed=completed,
        failed=failed,
        cut=drawn(rng, completed, how.cut),
        cold=spread(rng, completed - warm, 200 * load * how.slower),
        warm=spread(rng, warm, 80 * load * how.slower),
        token=spread(rng, completed, 20 * load * how.slower_token),
        scores={level: n for level, n in ((10, up), (0, votes - up)) if n},
    )


def rolled(rng: np.random.Generator, canary: Behaviour, stable: Behaviour = GOOD) -> tuple[Verdict, int]:
    """How it ended, and how many requests of the canary that took. The load swings."""
    percent, seen, now = PLAN.steps[0], 0, 0.0
    trial = Trial(PLAN, percent, Progress())
    while True:
        now += 1.0
        load = 1.5 if now % 20 < 10 else 1.0
        tried = drawn(rng, RATE, percent / 100)
        seen += tried
        trial.take(counted(rng, canary, tried, load), counted(rng, stable, RATE - tried, load), now)
        verdict = trial.verdict(2, 1, now)
        if verdict is not None and verdict.decision is not Decision.STEP:
            return verdict, seen
        if verdict is not None:
            percent = verdict.percent
            trial.stepped(PLAN, percent)


def test_equal_versions_are_promoted_but_for_the_stated_rate() -> None:
    ends = [rolled(np.random.default_rng(seed), GOOD)[0].decision for seed in range(200)]
    assert ends.count(Decision.ROLLBACK) <= 200 * ALPHA
    assert ends.count(Decision.PROMOTE) >= 198


def test_a_better_version_is_promoted() -> None:
    better = Behaviour(fails=0.0, slower=0.7, slower_token=0.8, liked=0.95)
    assert {rolled(np.random.default_rng(seed), better)[0].decision for seed in range(10)} == {Decision.PROMOTE}


@pytest.mark.parametrize(("how", "reason", "most"), BAD.values(), ids=BAD.keys())
def test_a_bad_version_is_rolled_back_within_so_many_of_its_requests(how: Behaviour, reason: str, most: int) -> None:
    for seed in range(15):
        verdict, seen = rolled(np.random.default_rng(seed), how)
        assert (verdict.decision, verdict.reason) == (Decision.ROLLBACK, reason)
        assert seen <= most
        assert verdict.why.startswith(f"{reason}: ")
        assert "with version 2, " in verdict.why


def test_what_befalls_both_at_once_is_no_canarys_fault() -> None:
    bad = Behaviour(fails=0.5, slower=3.0, liked=0.1)
    assert {rolled(np.random.default_rng(seed), bad, bad)[0].decision for seed in range(10)} == {Decision.PROMOTE}


def test_a_step_waits_for_requests_of_both_and_not_for_ever() -> None:
    plan = dataclasses.replace(PLAN, steps=(10, 50), min_requests=5, step_limit_s=60.0, step_since_unix_s=1_000.0)
    trial = Trial(plan, 10, Progress())
    trial.take(VersionCounts(completed=4), VersionCounts(completed=90), 1.0)
    assert trial.verdict(2, 1, 1_059.0) is None
    late = trial.verdict(2, 1, 1_060.0)
    assert late is not None
    assert (late.decision, late.reason) == (Decision.ROLLBACK, "time")
    assert "4 requests of version 2 and 90 of version 1" in late.why
    trial.take(VersionCounts(completed=1), VersionCounts(), 2.0)
    step = trial.verdict(2, 1, 1_060.0)
    assert step is not None
    assert (step.decision, step.percent) == (Decision.STEP, 50)
    trial.stepped(plan, 50)
    assert trial.verdict(2, 1, 1_000.0) is None
    trial.take(VersionCounts(completed=5), VersionCounts(completed=5), 3.0)
    assert trial.verdict(2, 1, 1_009.0) is None, "scores are still to come"
    last = trial.verdict(2, 1, 1_010.0)
    assert last is not None
    assert last.decision is Decision.PROMOTE


def test_a_trial_goes_on_elsewhere_with_its_evidence() -> None:
    """A next leader's: else each change of leaders would have its own chance of a false alarm."""
    first = Trial(PLAN, 1, Progress())
    first.take(VersionCounts(completed=1, failed=2), VersionCounts(completed=300), 1.0)
    line = Line(AdapterVersion(1, "one", 8, 1, ("q",), 0.0))
    line, _ = line.add(AdapterVersion(0, "two", 8, 1, ("q",), 0.0), 0.0)
    line = line.roll_out(2, 0, "user", "salt", 5.0, PLAN).progressed(first.progress)
    read = AdapterRecord.from_json(AdapterRecord.of("acme", "up", line).to_json()).line.rollout
    assert read is not None
    assert (read.plan, read.trial, read.percent) == (dataclasses.replace(PLAN, step_since_unix_s=5.0), "t", 1)
    [progress] = read.progress
    assert progress == first.progress
    assert (progress.canary_requests, progress.stable_requests) == (3, 300)
    second = Trial(PLAN, 1, progress)
    for trial in (first, second):
        trial.take(VersionCounts(failed=9), VersionCounts(completed=100), 2.0)
        verdict = trial.verdict(2, 1, 6.0)
        assert verdict is not None
        assert verdict.decision is Decision.ROLLBACK
    assert first.progress == second.progress


def test_a_progress_of_another_version_of_this_program_begins_anew() -> None:
    trial = Trial(PLAN, 1, Progress())
    trial.take(VersionCounts(failed=9), VersionCounts(completed=99), 1.0)
    [errors, *others] = trial.progress.findings
    assert errors.name == Doubt.ERRORS
    cut = dataclasses.replace(errors, evidence=dataclasses.replace(errors.evidence, logs=(9.0,)))
    unknown = dataclasses.replace(errors, name="moon phase")
    again = Trial(PLAN, 1, Progress(0, 0, (cut, unknown, *others)))
    assert again.progress.evidence == pytest.approx(1.0)


def test_outcomes_without_a_counterpart_are_not_compared_later() -> None:
    """Of different minutes they are of different loads."""
    trial = Trial(PLAN, 1, Progress())
    trial.take(VersionCounts(failed=50), VersionCounts(), 0.0)
    trial.take(VersionCounts(), VersionCounts(), 50.0)
    trial.take(VersionCounts(), VersionCounts(completed=50), 70.0)
    assert trial.verdict(2, 1, 1.0) is None
    trial.take(VersionCounts(failed=50), VersionCounts(completed=50), 71.0)
    assert trial.verdict(2, 1, 1.0) is not None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": ()}, "steps must be 1 to 16"),
        ({"steps": (0, 10)}, "from 1 to 99"),
        ({"steps": (10, 100)}, "from 1 to 99"),
        ({"steps": (10, 5)}, "steps must grow"),
        ({"min_requests": 0}, "min_requests"),
        ({"step_limit_s": 0.5}, "step_limit_s"),
        ({"step_limit_s": float("inf")}, "step_limit_s"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(changed: Mapping[str, object], said: str) -> None:
    problem = dataclasses.replace(PLAN, **changed).problem  # type: ignore[arg-type]
    assert problem is not None
    assert said in problem
    assert PLAN.problem is None
