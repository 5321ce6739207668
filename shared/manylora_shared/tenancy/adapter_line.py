"""An adapter's name as a line of numbered versions: which one is in force, which one a share of the requests
tries, what became of them. Pure: a change takes a line and `now` and gives another, or raises LineProblem.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from manylora_shared.ids import DEFAULT_POOL
from manylora_shared.tenancy.trial import Decision, Plan, Progress, Verdict, begun

MAX_VERSIONS = 32  # of a name that can be asked for
MAX_RETIRED = 32  # that are still told of
MAX_EVENTS = 64


class Sticky(enum.StrEnum):
    """What keeps its version while a rollout stands: each request for itself, a conversation, a user."""

    REQUEST = "request"
    CONVERSATION = "conversation"
    USER = "user"


class Change(enum.StrEnum):
    ADD = "add"
    ROLLOUT = "rollout"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    RETIRE = "retire"
    REJECT = "reject"  # added, and not served


class LineProblem(ValueError):
    """Why a change cannot be made, in words for its caller. `field`: of the request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True)
class AdapterVersion:
    number: int
    uid: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float
    retired_unix_s: float = 0.0  # 0: it can be asked for
    state: str = ""  # rejected or inconclusive: the gate's verdict, for which nobody gets it
    report: str = ""  # its validation report's digest; empty: there is none
    pool: str = DEFAULT_POOL  # for whose base model it was made
    base_digest: str = ""  # of that model; empty: an earlier version of manylora took it in
    rope: str = ""  # its rotation of positions, where that is not the base model's; equal for equal ones
    max_context_tokens: int = 0  # 0: the base model's
    goes_alone: bool = False  # in a request, with weight 1: it scales or shifts what layers give

    @property
    def is_served(self) -> bool:
        return not self.retired_unix_s and not self.state


@dataclass(frozen=True)
class Rollout:
    to: int
    percent: int  # of the requests that name no version
    sticky: str  # a Sticky
    salt: str  # other shares of users in each rollout; stays while it goes on
    plans: tuple[Plan, ...] = ()  # one of a rollout that judges itself
    progress: tuple[Progress, ...] = ()

    @property
    def plan(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def trial(self) -> str:
        """What its requests are counted under."""
        return self.plan.trial if self.plan is not None else self.salt

    def __post_init__(self) -> None:
        if self.sticky not in tuple(Sticky) or not 0 <= self.percent <= 100:
            raise ValueError("Rollout: its sticky or percent is none")

    def takes(self, sticky_key: str) -> bool:
        """Who is taken at some percentage is taken at every higher one."""
        digest = hashlib.sha256(f"{self.salt}\0{sticky_key}".encode()).digest()
        return int.from_bytes(digest[:8]) * 100 < self.percent << 64


@dataclass(frozen=True)
class LineEvent:
    at_unix_s: float
    change: str  # a Change
    number: int  # the version that it is about: after a promotion or rollback the one in force
    before: int = 0  # that was in force before; 0: the same
    percent: int = 0
    why: str = ""  # of a rollout that judges itself


@dataclass(frozen=True)
class StickyKeys:
    """A caller's, for the choice of a version; empty ones stand back behind the request's own."""

    request: str
    conversation: str = ""
    user: str = ""

    def of(self, sticky: str) -> str:
        named = {Sticky.CONVERSATION: self.conversation, Sticky.USER: self.user}.get(Sticky(sticky), "")
        return f"{sticky}\0{named}" if named else self.request


@dataclass(frozen=True)
class Line:
    in_force: AdapterVersion
    others: tuple[AdapterVersion, ...] = ()
    rollouts: tuple[Rollout, ...] = ()  # none or one
    events: tuple[LineEvent, ...] = ()

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """By number, retired ones too."""
        return tuple(sorted((self.in_force, *self.others), key=lambda version: version.number))

    @property
    def served(self) -> tuple[AdapterVersion, ...]:
        return tuple(version for version in self.versions if version.is_served)

    @property
    def rollout(self) -> Rollout | None:
        return self.rollouts[0] if self.rollouts else None

    def version(self, number: int) -> AdapterVersion | None:
        """None: there is none, or nobody gets it."""
        return next((version for version in self.served if version.number == number), None)

    def choose(self, asked: int | None, keys: StickyKeys) -> AdapterVersion | None:
        """For one request. None: the version that it asks for is none."""
        if asked is not None:
            return self.version(asked)
        rollout = self.rollout
        if rollout is not None and rollout.takes(keys.of(rollout.sticky)):
            return self.version(rollout.to) or self.in_force
        return self.in_force if self.in_force.is_served else None  # a name's first version may have been rejected

    def add(self, version: AdapterVersion, now_unix_s: float) -> tuple[Self, AdapterVersion]:
        """The line with the version under the next number, and that version; one that is served already stays."""
        known = next((each for each in self.served if each.uid == version.uid), None)
        if known is not None:
            return self, known
        if version.pool != self.in_force.pool:
            raise LineProblem("pool", f"is {version.pool}; the other versions are of pool {self.in_force.pool}")
        if version.is_served and len(self.served) >= MAX_VERSIONS:
            raise LineProblem("name", f"has {MAX_VERSIONS} versions, as many as a name may have: retire some")
        new = replace(version, number=self.versions[-1].number + 1)
        event = LineEvent(now_unix_s, Change.REJECT if new.state else Change.ADD, new.number)
        if new.is_served and not self.served:
            return self._in_force(new, event), new
        return self._told(event, others=_remembered((*self.others, new), new.number)), new

    def roll_out(
        self, to: int, percent: int, sticky: str, salt: str, now_unix_s: float, plan: Plan | None = None
    ) -> Self:
        """`salt`: of a rollout that is new. With a plan its first step is the share."""
        if plan is not None:
            if plan.problem:
                raise LineProblem("auto", plan.problem)
            percent = plan.steps[0]
        self._served(to)
        if to == self.in_force.number:
            raise LineProblem("to", f"version {to} is in force already")
        if not 0 <= percent <= 100:
            raise LineProblem("percent", f"must be from 0 to 100, not {percent}")
        if sticky not in tuple(Sticky):
            raise LineProblem("sticky", f"must be one of {', '.join(Sticky)}")
        before = self.rollout
        if before is not None and (before.to, before.sticky) == (to, sticky):
            salt = before.salt
        event = LineEvent(now_unix_s, Change.ROLLOUT, to, percent=percent)
        plans = (begun(plan, now_unix_s),) if plan is not None else ()
        return self._told(event, rollouts=(Rollout(to, percent, sticky, salt, plans),))

    def judged(self, verdict: Verdict, now_unix_s: float) -> Self:
        """What a rollout's trial has found, carried out."""
        rollout = self.rollout
        assert rollout is not None
        assert rollout.plan is not None
        match verdict.decision:
            case Decision.ROLLBACK:
                after = self.roll_back(now_unix_s)
            case Decision.PROMOTE:
                after = self.promote(rollout.to, now_unix_s)
            case Decision.STEP:
                plans = (begun(rollout.plan, now_unix_s),)
                event = LineEvent(now_unix_s, Change.ROLLOUT, rollout.to, percent=verdict.percent)
                after = self._told(event, rollouts=(replace(rollout, percent=verdict.percent, plans=plans),))
        return replace(after, events=(*after.events[:-1], replace(after.events[-1], why=verdict.why)))

    def progressed(self, progress: Progress) -> Self:
        return replace(self, rollouts=tuple(replace(each, progress=(progress,)) for each in self.rollouts))

    def promote(self, to: int, now_unix_s: float) -> Self:
        """Puts a version in force for all, and ends a rollout. 0: the rollout's, or else the newest."""
        rollout = self.rollout
        number = to or (rollout.to if rollout is not None else (self.served or self.versions)[-1].number)
        version = self._served(number)
        if version == self.in_force and rollout is None:
            return self
        event = LineEvent(now_unix_s, Change.PROMOTE, number, before=self.in_force.number)
        return self._in_force(version, event)

    def roll_back(self, now_unix_s: float) -> Self:
        """Ends a rollout; where there is none, the version that was in force before the last promotion is again."""
        if self.rollout is not None:
            event = LineEvent(now_unix_s, Change.ROLLBACK, self.in_force.number, before=self.in_force.number)
            return self._told(event, rollouts=())
        number = self._before()
        if number is None:
            raise LineProblem("name", "no version was in force before this one, or it is retired")
        event = LineEvent(now_unix_s, Change.ROLLBACK, number, before=self.in_force.number)
        return self._in_force(self._served(number), event)

    def retire(self, number: int, now_unix_s: float) -> Self:
        self._served(number)
        if number == self.in_force.number or (self.rollout is not None and number == self.rollout.to):
            raise LineProblem("number", f"version {number} is in force or in a rollout: promote or roll back first")
        others = [replace(v, retired_unix_s=now_unix_s) if v.number == number else v for v in self.others]
        event = LineEvent(now_unix_s, Change.RETIRE, number)
        return self._told(event, others=_remembered(others, self.versions[-1].number))

    def _served(self, number: int) -> AdapterVersion:
        version = self.version(number)
        if version is None:
            raise LineProblem("to", f"version {number} is none of this adapter, or is retired or rejected")
        return version

    def _before(self) -> int | None:
        # Promotions that a rollback took back count no more: rolling back twice goes two versions back.
        stack: list[int] = []
        for event in self.events:
            if event.change == Change.PROMOTE and event.before != event.number:
                stack.append(event.before)
            elif event.change == Change.ROLLBACK and event.before != event.number and stack:
                stack.pop()
        while stack:
            number = stack.pop()
            if number != self.in_force.number and self.version(number) is not None:
                return number
        return None

    def _in_force(self, version: AdapterVersion, event: LineEvent) -> Self:
        others = tuple(each for each in (*self.others, self.in_force) if each.number != version.number)
        return self._told(event, in_force=version, others=others, rollouts=())

    def _told(
        self,
        event: LineEvent,
        *,
        in_force: AdapterVersion | None = None,
        others: tuple[AdapterVersion, ...] | None = None,
        rollouts: tuple[Rollout, ...] | None = None,
    ) -> Self:
        return replace(
            self,
            in_force=in_force or self.in_force,
            others=self.others if others is None else others,
            rollouts=self.rollouts if rollouts is None else rollouts,
            events=_kept((*self.events, event)),
        )


def _kept(events: tuple[LineEvent, ...]) -> tuple[LineEvent, ...]:
    """Of the older half what changed the version in force stays longest: a rollback goes by it."""
    if len(events) <= MAX_EVENTS:
        return events
    oldest = next((i for i, event in enumerate(events[: MAX_EVENTS // 2]) if event.before in (0, event.number)), 0)
    return (*events[:oldest], *events[oldest + 1 :])


def _remembered(others: Iterable[AdapterVersion], newest: int) -> tuple[AdapterVersion, ...]:
    """Without the oldest of those that nobody gets. The newest of all stays, so that no number is given twice."""
    kept = sorted(others, key=lambda version: version.number)
    unserved = [version for version in kept if not version.is_served]
    forgotten = [v for v in unserved if v.number != newest][: max(0, len(unserved) - MAX_RETIRED)]
    return tuple(version for version in kept if version not in forgotten)
