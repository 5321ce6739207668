"""A rollout that judges itself: the outcomes of its version (the canary) beside those of the version in force, over the
same stretches of time, until it goes a step on, is promoted or is rolled back. Pure; one process has the trial.

A canary that is no worse is rolled back with a probability of at most ALPHA over the whole rollout, however often it is
judged (two_samples; the mean of e-processes is one). This counts requests as independent of one another.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from manylora_shared.tenancy.slo import bucket_of, quantile_ms
from manylora_shared.tenancy.two_samples import ALTERNATIVES, Evidence

ALPHA = 0.01
LIMIT = 1.0 / ALPHA  # of the evidence
STEPS = (1, 10, 50)  # percent; after the last it is promoted
MIN_REQUESTS = 200  # of each version in each step
LEAST_STEP_S = 10.0  # a score comes some seconds behind its answer, and is told five more behind it
STEP_LIMIT_S = 24 * 3600.0
MAX_STEPS = 16
MAX_TRIALS = 256  # of all tenants, at a time
MAX_STEP_LIMIT_S = 30 * 86_400.0
MIN_OUTCOMES = 10  # of the canary, before an alarm is believed
MAX_PAUSE_S = 60.0  # outcomes that find none of the other version in this time are not compared
SCORE_LEVELS = 10  # a score counts as the nearest tenth
_MEMORY = 2_000  # of what is usual
_MEDIAN = 0.5


@dataclass(frozen=True)
class Plan:
    steps: tuple[int, ...]  # percent, growing
    min_requests: int  # of each version in each step
    step_limit_s: float
    trial: str  # its name: another in each rollout that begins
    step_since_unix_s: float = 0.0

    @property
    def problem(self) -> str | None:
        """What is wrong with it, as `field must ...`."""
        if not 1 <= len(self.steps) <= MAX_STEPS or any(not 1 <= step <= 99 for step in self.steps):
            return f"steps must be 1 to {MAX_STEPS} shares from 1 to 99 percent: after the last comes the promotion"
        if list(self.steps) != sorted(set(self.steps)):
            return "steps must grow"
        if not 1 <= self.min_requests <= 1_000_000:
            return "min_requests must be from 1 to 1000000"
        if not 1.0 <= self.step_limit_s <= MAX_STEP_LIMIT_S:
            return f"step_limit_s must be from 1 to {MAX_STEP_LIMIT_S:.0f} seconds"
        return None

    def after(self, percent: int) -> int | None:
        """The next step; None: promotion."""
        return next((step for step in self.steps if step > percent), None)


@dataclass(frozen=True)
class Finding:
    name: str  # a Doubt
    evidence: Evidence


@dataclass(frozen=True)
class Progress:
    """What a trial goes on with elsewhere."""

    canary_requests: int = 0  # in this step, as the next
    stable_requests: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def evidence(self) -> float:
        """Against the canary; at LIMIT it is rolled back."""
        weights = sum(_KINDS[Doubt(each.name)].weight for each in self.known)
        found = sum(_KINDS[Doubt(each.name)].weight * each.evidence.value for each in self.known)
        return found / weights if weights else 1.0

    @property
    def known(self) -> list[Finding]:
        return [each for each in self.findings if each.name in tuple(Doubt)]


class Doubt(enum.StrEnum):
    ERRORS = "errors"
    FIRST_TOKEN = "first_token"
    TOKEN_TIME = "token_time"
    CUT = "cut"
    ENDED = "ended"
    FEEDBACK = "feedback"


@dataclass(frozen=True)
class _Kind:
    says: str  # of the outcomes that speak against the canary
    margin: float  # by which the canary's share of them may be larger
    weight: float = 1.0


_KINDS: Mapping[Doubt, _Kind] = {
    Doubt.ERRORS: _Kind("requests failed", 0.01),
    Doubt.FIRST_TOKEN: _Kind("first tokens came later than 1.5 times what was usual", 0.05),
    Doubt.TOKEN_TIME: _Kind("answers took more than 1.25 times the usual time for a token", 0.05),
    Doubt.CUT: _Kind("answers were cut at their length", 0.1, 0.5),
    Doubt.ENDED: _Kind("answers ended by themselves", 0.1, 0.5),
    Doubt.FEEDBACK: _Kind("of the feedback's points were lost", 0.05),
}


@dataclass
class VersionCounts:
    """Of one version, in one stretch of time. Times are in slo's buckets."""

    completed: int = 0
    failed: int = 0
    cut: int = 0  # of the completed ones, at their length
    cold: dict[int, int] = field(default_factory=dict)  # first tokens of prompts of which nothing was cached
    warm: dict[int, int] = field(default_factory=dict)  # of the others
    token: dict[int, int] = field(default_factory=dict)  # time for each token after the first
    scores: dict[int, int] = field(default_factory=dict)  # in SCORE_LEVELS

    @property
    def requests(self) -> int:
        return self.completed + self.failed

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.scores)

    def add(self, other: VersionCounts) -> None:
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, int):
                setattr(self, each.name, mine + others)
            else:
                for key, count in others.items():
                    mine[key] = mine.get(key, 0) + count


@dataclass(frozen=True)
class Stream:
    """Outcomes of one kind. `slow`: of times, by how much of the usual one is too much; 0: its keys are percent."""

    doubt: Doubt
    read: Callable[[VersionCounts], Mapping[int, int]]
    slow: float = 0.0


# A cold adapter's load is no version's own doing (the caller leaves it out), and the rarer version finds less of its
# prompts cached: those with and without are compared among themselves.
_STREAMS = (
    Stream(Doubt.ERRORS, lambda of: {100: of.failed, 0: of.completed}),
    Stream(Doubt.FIRST_TOKEN, lambda of: of.cold, 1.5),
    Stream(Doubt.FIRST_TOKEN, lambda of: of.warm, 1.5),
    Stream(Doubt.TOKEN_TIME, lambda of: of.token, 1.25),
    Stream(Doubt.CUT, lambda of: {100: of.cut, 0: of.completed - of.cut}),
    Stream(Doubt.ENDED, lambda of: {100: of.completed - of.cut, 0: of.cut}),
    Stream(Doubt.FEEDBACK, lambda of: {100 - 100 * level // SCORE_LEVELS: n for level, n in of.scores.items()}),
)


class _Pending:
    """A stream's outcomes that are not compared yet."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._usual: Counter[int] = Counter()  # of the version in force, before these
        self._since = -math.inf
        self._clear()

    def take(
        self, canary: VersionCounts, stable: VersionCounts, now: float
    ) -> tuple[dict[float, int], dict[float, int]] | None:
        """A block, once there are outcomes of both."""
        if now - self._since > MAX_PAUSE_S:
            self._forget()
        if not self._canary and not self._stable:
            self._since = now
        self._canary.update({key: n for key, n in self.stream.read(canary).items() if n})
        self._stable.update({key: n for key, n in self.stream.read(stable).items() if n})
        if not self._canary or not self._stable:
            return None
        found = self._judged(self._canary), self._judged(self._stable)
        self._forget()
        return found if found[0] and found[1] else None

    def _judged(self, counts: Counter[int]) -> dict[float, int]:
        """By how far they speak against the canary. Empty where nothing is known of what is usual."""
        if not self.stream.slow:
            return {key / 100: n for key, n in counts.items()}
        usual_ms = quantile_ms(self._usual, _MEDIAN)
        if usual_ms is None:
            return {}
        most = bucket_of(usual_ms * self.stream.slow)
        late = sum(n for bucket, n in counts.items() if bucket > most)
        return {value: n for value, n in ((1.0, late), (0.0, counts.total() - late)) if n}

    def _forget(self) -> None:
        if self.stream.slow:
            self._usual.update(self._stable)
            while self._usual.total() > _MEMORY:
                self._usual = Counter({key: n // 2 for key, n in self._usual.items() if n > 1})
        self._clear()

    def _clear(self) -> None:
        self._canary: Counter[int] = Counter()
        self._stable: Counter[int] = Counter()


class Decision(enum.StrEnum):
    STEP = "step"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Verdict:
    decision: Decision
    why: str
    reason: str  # a Doubt, or `requests` or `time`
    percent: int = 0  # of a step


class Trial:
    def __init__(self, plan: Plan, percent: int, progress: Progress) -> None:
        """`progress`: as the last one left it."""
        self.plan = plan
        self._percent = percent
        self._requests = [progress.canary_requests, progress.stable_requests]
        whole = [each for each in progress.findings if len(each.evidence.logs) == len(ALTERNATIVES)]
        before = {each.name: each.evidence for each in whole}
        self._evidence = {doubt: before.get(doubt, Evidence()) for doubt in Doubt}
        self._pending = [_Pending(stream) for stream in _STREAMS]

    @property
    def progress(self) -> Progress:
        findings = tuple(Finding(doubt.value, evidence) for doubt, evidence in self._evidence.items())
        return Progress(self._requests[0], self._requests[1], findings)

    def take(self, canary: VersionCounts, stable: VersionCounts, now: float) -> None:
        """What came since the last call; `now` by any clock that runs evenly."""
        self._requests[0] += canary.requests
        self._requests[1] += stable.requests
        for pending in self._pending:
            block = pending.take(canary, stable, now)
            if block is not None:
                doubt = pending.stream.doubt
                self._evidence[doubt] = self._evidence[doubt].take(*block, _KINDS[doubt].margin)

    def stepped(self, plan: Plan, percent: int) -> None:
        self.plan, self._percent, self._requests = plan, percent, [0, 0]

    def verdict(self, to: int, in_force: int, now_unix_s: float) -> Verdict | None:
        """`to` and `in_force`: numbers of the versions. None: it goes on as it is."""
        value = self.progress.evidence
        worst = max(Doubt, key=lambda doubt: _KINDS[doubt].weight * self._evidence[doubt].value)
        counts = f"{self._requests[0]} requests of version {to} and {self._requests[1]} of version {in_force}"
        if value >= LIMIT and self._evidence[worst].first_count >= MIN_OUTCOMES:
            return Verdict(Decision.ROLLBACK, self._told(worst, to, in_force, value), worst.value)
        step_s = now_unix_s - self.plan.step_since_unix_s
        if min(self._requests) >= self.plan.min_requests and not 0.0 <= step_s < LEAST_STEP_S:
            why = f"{counts} at {self._percent} % gave no alarm (evidence {value:.3g}, limit {LIMIT:g})"
            percent = self.plan.after(self._percent)
            if percent is None:
                return Verdict(Decision.PROMOTE, why, "requests")
            return Verdict(Decision.STEP, why, "requests", percent)
        if step_s >= self.plan.step_limit_s:
            wanted = f"{self.plan.min_requests} of each were wanted in {self.plan.step_limit_s:g} s"
            return Verdict(Decision.ROLLBACK, f"there were {counts} at {self._percent} %; {wanted}", "time")
        return None

    def _told(self, doubt: Doubt, to: int, in_force: int, value: float) -> str:
        evidence = self._evidence[doubt]
        first, second = evidence.means
        return (
            f"{doubt.value}: {first:.1%} of {evidence.first_count} {_KINDS[doubt].says} with version {to}, "
            f"{second:.1%} of {evidence.second_count} with version {in_force} (evidence {value:.3g}, limit {LIMIT:g})"
        )


def begun(plan: Plan, now_unix_s: float) -> Plan:
    """At a step's beginning."""
    return replace(plan, step_since_unix_s=now_unix_s)
