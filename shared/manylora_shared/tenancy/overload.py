"""What is given up under overload, in which order and how far (docs/decisions/0018). Pure; owns levels.

A request's *height* is its place in its tenant's demand, in shares; what is at a limit or above is given up, and no
limit is below one share. A flow is *within its share* where its tenant's demand, up to and with its class, is one
share at most: no level takes anything of it.
"""

from __future__ import annotations

import enum
import math
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from manylora_shared.ids import QosClass, TenantId

LEVELS = 128
MAX_OUTPUT_TOKENS = 1024
MIN_OUTPUT_TOKENS = 16
ALLOWED_PART = 0.1  # the part of a class's requests that may wait longer than its target
HOLD_PART = 0.05  # between this part and ALLOWED_PART a level stays where it is
WARNING_PART = 0.4  # of a class's target: less important requests give way before it is missed
MAX_ERROR = 2.0
WINDOW_S = 0.5
RISE_PER_S = 4.0  # levels at an error of 1
FALL_PER_S = 2.0  # levels at an error of -1
ROOM_FALL_PER_S = 16.0  # levels at an error of -1 while nobody waits and MUCH_ROOM of all slots is free
MUCH_ROOM = 0.05
PROPORTIONAL = 2.0  # levels for a change of the error by 1; the greatest change stays within TURNS
_MIN_SEEN = 0.5
MAX_RETRY_S = 8.0
MIN_RETRY_S = 1.0


class Rung(enum.Enum):
    NONE = "none"
    TURNS = "turns"
    BATCH_ADMISSION = "batch_admission"
    BATCH_OUTPUT = "batch_output"
    BATCH_QUEUE = "batch_queue"
    STANDARD = "standard"
    INTERACTIVE = "interactive"


_ENDS = {
    Rung.NONE: 0,
    Rung.TURNS: 16,
    Rung.BATCH_ADMISSION: 32,
    Rung.BATCH_OUTPUT: 48,
    Rung.BATCH_QUEUE: 64,
    Rung.STANDARD: 96,
    Rung.INTERACTIVE: LEVELS,
}
_RUNGS = list(Rung)
_BEGINS = {rung: _ENDS[before] for before, rung in pairwise(_RUNGS)}
_BOUNDS = list(_ENDS.values())
ADMISSION = {
    QosClass.BATCH: Rung.BATCH_ADMISSION,
    QosClass.STANDARD: Rung.STANDARD,
    QosClass.INTERACTIVE: Rung.INTERACTIVE,
}
_QUEUE = ADMISSION | {QosClass.BATCH: Rung.BATCH_QUEUE}
_CLASSES = {rung: qos_class for rungs in (ADMISSION, _QUEUE) for qos_class, rung in rungs.items()}
# A class's own waiting does not raise a level beyond the levels that take its requests.
_OWN = {qos_class: (_BEGINS[ADMISSION[qos_class]], _ENDS[_QUEUE[qos_class]]) for qos_class in QosClass}
STACK = (QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH)  # from the bottom of a tenant's demand to its top
STACK_INDEX = {qos_class: index for index, qos_class in enumerate(STACK)}


def rung_of(level: int) -> Rung:
    return _RUNGS[bisect_left(_BOUNDS, level)]


def kept_part(level: int, rung: Rung) -> float:
    """The part of the rung's demand that is kept: 1 up to the rung's begin, 0 from its end on."""
    begin, end = _BEGINS[rung], _ENDS[rung]
    if level <= begin:
        return 1.0
    return max((end - level) / (end - begin), 0.0)


def class_of(level: int) -> QosClass | None:
    return _CLASSES.get(rung_of(level))


def output_cap(level: int) -> int | None:
    """The cap for a choice of a batch request that is granted now, or None."""
    begin, end = _ENDS[Rung.BATCH_ADMISSION], _ENDS[Rung.BATCH_OUTPUT]
    if level <= begin:
        return None
    left = (end - min(level, end)) / (end - begin - 1)
    return int(MIN_OUTPUT_TOKENS * (MAX_OUTPUT_TOKENS / MIN_OUTPUT_TOKENS) ** left)


def place_of(request_id: str) -> float:
    # in [0, 1), the same for every observer
    return zlib.crc32(request_id.encode()) / (1 << 32)


def retry_after_s(level: int, request_id: str) -> float:
    # Spread by half either way, so that those who were refused together do not come back together.
    jitter = zlib.crc32(b"retry " + request_id.encode()) / (1 << 32)
    return (MIN_RETRY_S + (MAX_RETRY_S - MIN_RETRY_S) / 1.5 * level / LEVELS) * (0.5 + jitter)


@dataclass(frozen=True)
class TenantView:
    tops: tuple[float, float, float] = (1.0, 1.0, 1.0)  # in shares: the demand up to and with each class of STACK
    level: int = 0
    limit: float = math.inf  # the height from which on the highest rung that its level has begun takes requests


_UNKNOWN = TenantView()


@dataclass(frozen=True)
class OverloadView:
    """Made by the scheduler's leader, read by routers. An unlisted tenant counts as at its share, and is within it
    unless `is_crowded`.

    Theorem: nothing is taken from a flow that `is_within`. Proof: requests are refused and shed by `admits`, `keeps`
    and `place_limit` alone, which compare with `_limit`, and that is infinite there, while heights are finite; they
    are capped by `output_cap` alone, of `level_of`, which is 0 there.
    """

    level: int = 0
    limit: float = math.inf
    tenants: Mapping[TenantId, TenantView] = field(default_factory=dict)
    is_crowded: bool = False  # more tenants are above their shares than are listed

    @property
    def is_quiet(self) -> bool:
        return not self.level and not self.tenants

    def is_within(self, tenant_id: TenantId, qos_class: QosClass) -> bool:
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            return not self.is_crowded
        return tenant.tops[STACK_INDEX[qos_class]] <= 1.0

    def level_of(self, tenant_id: TenantId, qos_class: QosClass) -> int:
        """What acts on the flow: nothing within its share, else the cluster's level and its tenant's own."""
        if self.is_within(tenant_id, qos_class):
            return 0
        return max(self.level, self.tenants.get(tenant_id, _UNKNOWN).level)

    def why_refused(self, tenant_id: TenantId, qos_class: QosClass) -> str:
        level = self.level_of(tenant_id, qos_class)
        why = "this tenant asks for more than its share of a full cluster"
        if level == self.level:
            why = "the cluster is overloaded"
        return f"{why} (level {level} of {LEVELS}): this {qos_class.value} request is not taken now"

    def height_of(self, tenant_id: TenantId, qos_class: QosClass, request_id: str) -> float:
        below, top = self._part(tenant_id, qos_class)
        return below + place_of(request_id) * (top - below)

    def admits(self, tenant_id: TenantId, qos_class: QosClass, request_id: str) -> bool:
        if self.is_quiet:
            return True
        limit = self._limit(tenant_id, qos_class, ADMISSION[qos_class])
        return self.height_of(tenant_id, qos_class, request_id) < limit

    def keeps(self, tenant_id: TenantId, qos_class: QosClass, request_id: str) -> bool:
        limit = self._limit(tenant_id, qos_class, _QUEUE[qos_class])
        return self.height_of(tenant_id, qos_class, request_id) < limit

    def place_limit(self, tenant_id: TenantId, qos_class: QosClass) -> float:
        """The place (`place_of`) from which on `keeps` is false."""
        limit = self._limit(tenant_id, qos_class, _QUEUE[qos_class])
        below, top = self._part(tenant_id, qos_class)
        if top > below:
            return (limit - below) / (top - below)
        return math.inf if below < limit else 0.0

    def _part(self, tenant_id: TenantId, qos_class: QosClass) -> tuple[float, float]:
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            return 0.0, 1.0
        index = STACK_INDEX[qos_class]
        return tenant.tops[index - 1] if index else 0.0, tenant.tops[index]

    def _limit(self, tenant_id: TenantId, qos_class: QosClass, rung: Rung) -> float:
        if self.is_within(tenant_id, qos_class):
            return math.inf
        limit = _limit_of(rung, self.level, self.limit)
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            return limit
        # Above a share, or who is within its own could make all others lose theirs, by waiting.
        return max(1.0, min(limit, _limit_of(rung, tenant.level, tenant.limit)))

    def output_cap(self, tenant_id: TenantId, qos_class: QosClass, request_id: str) -> int | None:
        if qos_class is not QosClass.BATCH:
            return None
        if tenant_id in self.tenants and self.height_of(tenant_id, qos_class, request_id) < 1.0:
            return None
        return output_cap(self.level_of(tenant_id, qos_class))


@dataclass(frozen=True)
class Sample:
    """Waits of one class's requests that have a target."""

    count: float = 0  # not whole: a request may stand for several
    warned: float = 0  # longer than WARNING_PART of their target
    late: float = 0  # longer than their target


NO_SAMPLE = Sample()


def _limit_of(rung: Rung, level: int, limit: float) -> float:
    left = kept_part(level, rung)
    if left == 1.0 or left == 0.0:
        return math.inf if left else 0.0
    return limit


def error_of(late_part: float) -> float:
    """0 from HOLD_PART to ALLOWED_PART, -1 where nobody is late, MAX_ERROR at most."""
    if late_part > ALLOWED_PART:
        return min(late_part / ALLOWED_PART - 1.0, MAX_ERROR)
    return 0.0 if late_part >= HOLD_PART else late_part / HOLD_PART - 1.0


class LevelController:
    """A PI controller in velocity form over the part of late requests, in a window that fades with WINDOW_S.

    The class that misses its aim most moves the level, to the end of what it gives up itself.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._error = -1.0
        self._windows = {qos_class: _Window() for qos_class in QosClass}

    @property
    def level(self) -> int:
        return round(self._level)

    @property
    def is_idle(self) -> bool:
        return self._level == 0.0 and self._error == -1.0

    def late_part(self, qos_class: QosClass) -> float | None:
        """None where too few requests were seen."""
        window = self._windows[qos_class]
        return window.late / window.count if window.count >= _MIN_SEEN else None

    def step(self, samples: Mapping[QosClass, Sample], dt_s: float, *, free_part: float) -> None:
        """`samples` are of the last `dt_s` seconds; `free_part` is 0 while anybody waits."""
        faded = math.exp(-dt_s / WINDOW_S)
        # Turns end where there is room, and not before: without them those who are given way to would wait again.
        error, floor, top = -1.0, int(self._level >= 1.0 and free_part <= 0.0), 0
        for qos_class, window in self._windows.items():
            window.add(samples.get(qos_class, NO_SAMPLE), faded)
            if window.count < _MIN_SEEN or free_part > 0.0:
                continue
            begin, end = _OWN[qos_class]
            warned, late = error_of(window.warned / window.count), error_of(window.late / window.count)
            if self._level < begin:
                is_early = qos_class is QosClass.INTERACTIVE or self._level < _ENDS[Rung.TURNS]
                error = max(error, warned if is_early else late)
            elif self._level < end:
                error = max(error, late)
            if warned >= 0.0 and self._level >= begin:
                floor = max(floor, begin)
            if late >= 0.0 and self._level >= end:
                floor = max(floor, end)
            if self._level < begin and warned > 0.0:
                top = max(top, begin if qos_class is QosClass.INTERACTIVE or late > 0.0 else _ENDS[Rung.TURNS])
            if self._level < end and late > 0.0:
                top = max(top, end)
        speed = RISE_PER_S if error > 0.0 else max(FALL_PER_S, ROOM_FALL_PER_S * min(free_part / MUCH_ROOM, 1.0))
        moved = self._level + PROPORTIONAL * (error - self._error) + speed * error * dt_s
        self._level = min(max(moved, float(floor)), float(top) if error > 0.0 else float(LEVELS))
        self._error = error


class _Window:
    __slots__ = ("count", "late", "warned")

    def __init__(self) -> None:
        self.count = self.warned = self.late = 0.0

    def add(self, sample: Sample, faded: float) -> None:
        self.count = self.count * faded + sample.count
        self.warned = self.warned * faded + sample.warned
        self.late = self.late * faded + sample.late
