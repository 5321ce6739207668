"""How many workers a pool wants, and the measurements that say so (docs/OPERATIONS.md). Pure; time is passed in.

Owns what was seen of one pool in one term. Rates are in output tokens a second: a prompt token counts half of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOOK_S = 10.0  # between two steps of the trend
HORIZON_S = 300.0
LEVEL_PART = 0.3  # of a new value in the trend's level; Holt, Forecasting seasonals and trends, 1957
TREND_PART = 0.1
CAPACITY_MEMORY_S = 60.0
LEAST_BUSY = 0.05  # of a pool that is less busy nothing is learned of what it could do
TARGET_LOAD = 0.8
FULL = 0.95  # part of KV blocks from which on what waits, waits for memory too


class Trend:
    """Holt's linear trend over values that come every LOOK_S."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._slope = 0.0  # by step

    def add(self, value: float) -> None:
        if self._level is None:
            self._level = value
            return
        before = self._level
        self._level = LEVEL_PART * value + (1.0 - LEVEL_PART) * (before + self._slope)
        self._slope = TREND_PART * (self._level - before) + (1.0 - TREND_PART) * self._slope

    def after(self, seconds: float) -> float:
        """Never below 0."""
        return max(0.0, (self._level or 0.0) + self._slope * seconds / LOOK_S)


@dataclass(frozen=True)
class Seen:
    """Of a pool at one moment. Parts are from 0 to 1."""

    workers: int  # that take requests
    wanted_tps: float
    done_tps: float
    queued: int
    queue_s: float
    slots_part: float  # that is used
    kv_part: float  # that is used
    adapter_loads_part: float  # of late grants, those whose adapter had to be loaded
    dedicated: int = 0  # workers that are one tenant's with one adapter; parts are of the others


@dataclass(frozen=True)
class Signals:
    seen: Seen
    capacity_tps: float  # 0: nothing is known of it
    predicted_tps: float
    workers_wanted: int

    @property
    def load(self) -> float:
        return self.seen.wanted_tps / self.capacity_tps if self.capacity_tps else 0.0


class PoolSignals:
    def __init__(self) -> None:
        self._trend = Trend()
        self._stepped_at = -math.inf
        self._looked_at = -math.inf
        self._per_worker_tps = 0.0

    def look(self, seen: Seen, now: float) -> Signals:
        if now - self._stepped_at >= LOOK_S:
            self._trend.add(seen.wanted_tps)
            self._stepped_at = now
        self._learn(seen, now)
        capacity = self._per_worker_tps * seen.workers
        predicted = self._trend.after(HORIZON_S)
        return Signals(seen, capacity, predicted, self._wanted(seen, max(predicted, seen.wanted_tps)))

    def _learn(self, seen: Seen, now: float) -> None:
        # What is done by the busy part of slots or memory, whichever is busier, all of them would do as often over.
        faded = math.exp(-(now - self._looked_at) / CAPACITY_MEMORY_S)
        self._looked_at = now
        busy = max(seen.slots_part, seen.kv_part)
        if seen.workers and busy >= LEAST_BUSY and seen.done_tps > 0.0:
            found = seen.done_tps / min(busy, 1.0) / seen.workers
            self._per_worker_tps = found if not self._per_worker_tps else _mix(self._per_worker_tps, found, faded)

    def _wanted(self, seen: Seen, tps: float) -> int:
        """At most twice what there are and one more: what is learned of these comes before the next.

        At least those that are dedicated, and one for everybody.
        """
        most = 2 * seen.workers + 1
        found = seen.workers
        if self._per_worker_tps:
            found = math.ceil(min(tps / (TARGET_LOAD * self._per_worker_tps), most) - 1e-9)
        if seen.queued and (seen.kv_part >= FULL or not seen.workers):
            found = max(found, seen.workers + 1)
        return max(seen.dedicated + 1, min(found, most))


def _mix(before: float, value: float, faded: float) -> float:
    return faded * before + (1.0 - faded) * value
