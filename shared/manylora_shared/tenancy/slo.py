"""How well flows are served against their policies' promises, over a sliding window. Pure; time is passed in.

Owns the counts of at most `max_flows` flows. A quantile reads up to `RATIO` times its true value, never below it.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora_shared.errors import (
    AdapterFailed,
    Code,
    ManyloraError,
    Quarantined,
    QuotaExceeded,
    QuotaExhausted,
    SlowReader,
)
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import Slo

Flow = tuple[TenantId, QosClass]

LATENCY_WINDOW_S = 300.0
AVAILABILITY_WINDOW_S = 3600.0
NUM_SLICES = 60
MAX_FLOWS = 10_000
RATIO = 1.1
MIN_MS = 0.1
NUM_BUCKETS = 184  # up to an hour; what is longer counts in the last
TTFT_QUANTILE = 0.95
# what a caller without a TTFT target must have given for its deadline to count against the service
PATIENCE_MS = 10_000.0

_GOOD, _BAD = 0, 1
_IN_TIME, _LATE = 0, 1
_EXCUSED = frozenset(
    {
        Code.CANCELLED,
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.PERMISSION_DENIED,
        Code.FAILED_PRECONDITION,
        Code.ABORTED,
        Code.OUT_OF_RANGE,
        Code.UNIMPLEMENTED,
        Code.UNAUTHENTICATED,
    }
)


class Verdict(enum.Enum):
    GOOD = "good"
    BAD = "bad"
    EXCUSED = "excused"  # counts neither way


def verdict_of(error: Exception | None, *, given_ms: float, has_answered: bool, slo: Slo | None) -> Verdict:
    """Whose doing a request's end was.

    A deadline is the caller's, unless it passed before the first token and the caller had given the TTFT target
    (PATIENCE_MS without one). An error that is no ManyloraError is the service's. `given_ms` is from arrival to end.
    """
    match error:
        case None:
            return Verdict.GOOD
        case AdapterFailed() | Quarantined():
            return Verdict.BAD
        case SlowReader() | QuotaExceeded() | QuotaExhausted():
            return Verdict.EXCUSED
        case ManyloraError(code=Code.DEADLINE_EXCEEDED):
            patience_ms = PATIENCE_MS if slo is None or slo.ttft_p95_ms is None else slo.ttft_p95_ms
            is_stuck = not has_answered and given_ms >= patience_ms
            return Verdict.BAD if is_stuck else Verdict.EXCUSED
        case ManyloraError():
            return Verdict.EXCUSED if error.code in _EXCUSED else Verdict.BAD
        case _:
            return Verdict.BAD


def bucket_of(duration_ms: float) -> int:
    if duration_ms <= MIN_MS:
        return 0
    bucket = math.ceil(math.log(duration_ms / MIN_MS) / math.log(RATIO))
    if upper_ms(bucket - 1) >= duration_ms:  # the logarithm was rounded up over a whole number
        bucket -= 1
    return min(bucket, NUM_BUCKETS - 1)


def upper_ms(bucket: int) -> float:
    return float(MIN_MS * RATIO**bucket)


def quantile_ms(counts: Mapping[int, int], share: float) -> float | None:
    """The upper bound of the bucket that holds rank ceil(share * n) of n; None of none."""
    total = sum(counts.values())
    if not total:
        return None
    rank = math.ceil(share * total)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return upper_ms(bucket)
    raise AssertionError("the ranks end with the last bucket")


class SlidingCounts:
    """A ring of `NUM_SLICES` slices that fall out of it whole."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / NUM_SLICES
        self._slices: deque[tuple[int, dict[int, int]]] = deque()  # numbered by their time; empty ones are left out
        self._totals: dict[int, int] = {}

    def add(self, key: int, now: float) -> None:
        number = self._expire(now)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, {}))
        counts = self._slices[-1][1]
        counts[key] = counts.get(key, 0) + 1
        self._totals[key] = self._totals.get(key, 0) + 1

    def totals(self, now: float) -> Mapping[int, int]:
        """The result is valid until the next call."""
        self._expire(now)
        return self._totals

    def _expire(self, now: float) -> int:
        number = math.floor(now / self._slice_s)
        while self._slices and self._slices[0][0] <= number - NUM_SLICES:
            for key, count in self._slices.popleft()[1].items():
                left = self._totals[key] - count
                if left:
                    self._totals[key] = left
                else:
                    del self._totals[key]
        return number


@dataclass(frozen=True)
class FlowCounts:
    """Whose doing a request's end was: a deadline is the caller's unless it passed before the first token although the
    caller had given the TTFT target. `given_ms` is from arrival to end.
    """

    good: int = 0
    bad: int = 0
    in_time: int = 0  # first tokens within the TTFT target that the flow had then
    late: int = 0
    ttft: Mapping[int, int] = field(default_factory=dict)  # by bucket
    tpot: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: FlowCounts) -> FlowCounts:
        return FlowCounts(
            good=self.good + other.good,
            bad=self.bad + other.bad,
            in_time=self.in_time + other.in_time,
            late=self.late + other.late,
            ttft=_sum(self.ttft, other.ttft),
            tpot=_sum(self.tpot, other.tpot),
        )

    @property
    def num_counted(self) -> int:
        return self.good + self.bad

    @property
    def num_measured(self) -> int:
        return sum(self.ttft.values())

    @property
    def availability(self) -> float:
        """1 where nothing was counted."""
        return 1.0 - self.bad / self.num_counted if self.num_counted else 1.0

    def error_budget(self, target: float) -> float:
        """What is left of the failures that `target` permits: 1 is all, below 0 is overspent (Google's SRE book)."""
        return 1.0 - self.bad / ((1.0 - target) * self.num_counted) if self.num_counted else 1.0

    @property
    def is_ttft_met(self) -> bool | None:
        """None: no measured request had a target."""
        total = self.in_time + self.late
        return self.in_time >= math.ceil(TTFT_QUANTILE * total) if total else None


def _sum(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a.keys() | b.keys()}


class _FlowWindows:
    __slots__ = ("ends", "targets", "tpot", "ttft")

    def __init__(self) -> None:
        self.ends = SlidingCounts(AVAILABILITY_WINDOW_S)
        self.targets = SlidingCounts(LATENCY_WINDOW_S)
        self.ttft = SlidingCounts(LATENCY_WINDOW_S)
        self.tpot = SlidingCounts(LATENCY_WINDOW_S)

    def counts(self, now: float) -> FlowCounts:
        ends, targets = self.ends.totals(now), self.targets.totals(now)
        return FlowCounts(
            good=ends.get(_GOOD, 0),
            bad=ends.get(_BAD, 0),
            in_time=targets.get(_IN_TIME, 0),
            late=targets.get(_LATE, 0),
            ttft=dict(self.ttft.totals(now)),
            tpot=dict(self.tpot.totals(now)),
        )


class SloTracker:
    def __init__(self, max_flows: int = MAX_FLOWS) -> None:
        self._max_flows = max_flows
        self._flows: dict[Flow, _FlowWindows] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def ended(
        self,
        flow: Flow,
        verdict: Verdict,
        now: float,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        slo: Slo | None = None,
    ) -> None:
        """Told once for each request. `ttft_ms` is None without a first token, `tpot_ms` without a second one."""
        if verdict is Verdict.EXCUSED and ttft_ms is None:
            return
        windows = self._flows.pop(flow, None) or _FlowWindows()
        self._flows[flow] = windows
        if len(self._flows) > self._max_flows:
            del self._flows[next(iter(self._flows))]
        if verdict is not Verdict.EXCUSED:
            windows.ends.add(_GOOD if verdict is Verdict.GOOD else _BAD, now)
        if ttft_ms is not None:
            windows.ttft.add(bucket_of(ttft_ms), now)
            if slo is not None and slo.ttft_p95_ms is not None:
                windows.targets.add(_LATE if ttft_ms > slo.ttft_p95_ms else _IN_TIME, now)
        if tpot_ms is not None:
            windows.tpot.add(bucket_of(tpot_ms), now)

    def counts(self, now: float, *, tenant_id: str = "") -> dict[Flow, FlowCounts]:
        found = {flow: windows.counts(now) for flow, windows in self._flows.items() if tenant_id in ("", flow[0])}
        return {flow: counts for flow, counts in found.items() if counts.num_counted or counts.num_measured}
