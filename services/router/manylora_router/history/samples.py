"""The last hour in steps of ten seconds, as this router saw it. Owns the steps; `now` never falls.

A step names the tenants that used most in it, and all others are in its total alone: so it is bounded whoever comes.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora_shared.tenancy.slo import bucket_of, quantile_ms

STEP_S = 10.0
NUM_STEPS = 360
MAX_TENANTS = 128  # named in a step
MAX_COUNTED = 4_096  # tenants, while a step goes on


class Row(NamedTuple):
    """Counts of a step, and what stood at its end; milliseconds. None: nothing was measured."""

    requests: int = 0  # that ended
    failed: int = 0  # of these, after they were queued
    rejected: int = 0  # of these, before
    prompt_tokens: int = 0
    completion_tokens: int = 0
    waiting: int = 0
    running: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    queue_p95_ms: float | None = None


IDLE = Row()


@dataclass(eq=False, slots=True)
class _Counting:
    requests: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    queue: Counter[int] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def row(self, waiting: int, running: int) -> Row:
        return Row(
            self.requests,
            self.failed,
            self.rejected,
            self.prompt_tokens,
            self.completion_tokens,
            waiting,
            running,
            quantile_ms(self.ttft, 0.5),
            quantile_ms(self.ttft, 0.95),
            quantile_ms(self.queue, 0.95),
        )


class Standing(NamedTuple):
    """Requests of a tenant now."""

    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class Step:
    number: int  # since the beginning
    total: Row
    tenants: Mapping[str, Row]
    num_left_out: int  # tenants that are in the total alone

    def of(self, tenant: str) -> Row | None:
        """Empty: of all. None: it may be among those that were left out."""
        if not tenant:
            return self.total
        return self.tenants.get(tenant, None if self.num_left_out else IDLE)


class Samples:
    def __init__(self) -> None:
        self.began_at = self.closed_at = 0.0  # `closed_at`: when the last step ended
        self.steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self._total = _Counting()
        self._tenants: dict[str, _Counting] = {}
        self._used: Counter[str] = Counter()  # tokens by tenant in `steps`

    def begin(self, now: float) -> None:
        self.began_at = self.closed_at = now

    def tokens_came(self, tenant: str, tokens: int) -> None:
        for counting in self._counted(tenant):
            counting.completion_tokens += tokens

    def first_token(self, tenant: str, *, prompt_tokens: int, ttft_ms: float, queue_ms: float) -> None:
        for counting in self._counted(tenant):
            counting.prompt_tokens += prompt_tokens
            counting.ttft[bucket_of(ttft_ms)] += 1
            counting.queue[bucket_of(queue_ms)] += 1

    def ended(self, tenant: str, *, is_rejected: bool, is_failed: bool) -> None:
        for counting in self._counted(tenant):
            counting.requests += 1
            counting.rejected += is_rejected
            counting.failed += is_failed

    def close_step(self, standing: Mapping[str, Standing], now: float) -> None:
        """Each STEP_S once. standing: of the tenants with requests."""
        self.closed_at = now
        known = self._tenants.keys() | standing.keys()
        counted = {tenant: self._tenants.get(tenant) or _Counting() for tenant in known}
        order = sorted(known, key=lambda tenant: (-counted[tenant].tokens, -counted[tenant].requests, tenant))
        none = Standing(0, 0)
        total = Standing(sum(s.waiting for s in standing.values()), sum(s.running for s in standing.values()))
        named = {tenant: counted[tenant].row(*standing.get(tenant, none)) for tenant in order[:MAX_TENANTS]}
        number = self.steps[-1].number + 1 if self.steps else 0
        if len(self.steps) == NUM_STEPS:
            self._use(self.steps[0], -1)
            self._used = +self._used  # without those that have none left
        self.steps.append(Step(number, self._total.row(*total), named, len(order) - len(named)))
        self._use(self.steps[-1], 1)
        self._total, self._tenants = _Counting(), {}

    def rows(self, tenant: str) -> list[Row | None]:
        """Of the steps that are known, oldest first. Empty: of all tenants."""
        return [step.of(tenant) for step in self.steps]

    def most_used(self, most: int) -> list[str]:
        """The tenants with most tokens in the steps that are known."""
        return heapq.nsmallest(most, self._used, key=lambda tenant: (-self._used[tenant], tenant))

    def _use(self, step: Step, sign: int) -> None:
        for tenant, row in step.tenants.items():
            self._used[tenant] += sign * (row.prompt_tokens + row.completion_tokens)

    def _counted(self, tenant: str) -> Sequence[_Counting]:
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= MAX_COUNTED:
                return (self._total,)
            found = self._tenants[tenant] = _Counting()
        return self._total, found
