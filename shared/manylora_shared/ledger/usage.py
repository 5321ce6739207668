"""Questions to the ledger: which rows, and by what they are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.row import COLUMNS, KINDS, SUMMED, UsageRow, shown

# what a caller may sum by, and the column that says it; a day is of the end, in UTC
GROUPS: Mapping[str, str] = {
    "tenant": "tenant",
    "adapter": "adapter",
    "version": "adapter_version",
    "class": "qos_class",
    "key": "key",
    "pool": "pool",
    "model": "model",
    "outcome": "outcome",
    "day": "ended_unix_s",
    "month": "ended_unix_s",
}
_TIMES = {"day": "%Y-%m-%d", "month": "%Y-%m"}
TOTALS = ("requests", "degraded", *SUMMED)


@dataclass(frozen=True)
class Query:
    tenant: str = ""  # empty: all
    since_unix_s: float = 0.0
    until_unix_s: float | None = None  # not included

    def takes(self, row: UsageRow) -> bool:
        is_before = self.until_unix_s is None or row.ended_unix_s < self.until_unix_s
        return is_before and row.ended_unix_s >= self.since_unix_s and self.tenant in ("", row.tenant)


@dataclass(frozen=True)
class Sum:
    """Of the rows with these values of what was summed by."""

    group: Mapping[str, str]
    totals: Mapping[str, int] = field(default_factory=dict)  # by TOTALS

    def shown(self) -> dict[str, Any]:
        return {**self.group, **shown(self.totals)}

    @property
    def settled_tokens(self) -> int:
        told = self.totals
        return told["prompt_tokens"] - told["cached_tokens"] + told["completion_tokens"] + told["unread_tokens"]


def groups_of(names: Iterable[str]) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    wanted = tuple(dict.fromkeys(name for name in names if name))
    for name in wanted:
        if name not in GROUPS:
            raise InvalidRequest.of("by", f"{name[:40]!r} is none of {', '.join(GROUPS)}")
    return wanted


def told_of(message: Any, by: Sequence[str] | None) -> dict[str, Any]:
    """What people and programs outside read of a UsageRow message; `by`: of a sum."""
    if by is None:
        return shown({name: KINDS[name](getattr(message, name)) for name in COLUMNS})
    words = {name: getattr(message, name if name in _TIMES else GROUPS[name]) for name in by}
    return {**words, **shown({name: int(getattr(message, name)) for name in TOTALS})}


def group_of(row: UsageRow, by: Sequence[str]) -> tuple[str, ...]:
    return tuple([_value(row, name) for name in by])


def summed(rows: Iterable[UsageRow], by: Sequence[str]) -> list[Sum]:
    """In the order of their groups."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        totals = found.setdefault(group_of(row, by), dict.fromkeys(TOTALS, 0))
        totals["requests"] += 1
        totals["degraded"] += row.degraded
        for name in SUMMED:
            totals[name] += getattr(row, name)
    return [Sum(dict(zip(by, group, strict=True)), totals) for group, totals in sorted(found.items())]


def _value(row: UsageRow, name: str) -> str:
    if name in _TIMES:
        return datetime.fromtimestamp(row.ended_unix_s, UTC).strftime(_TIMES[name])
    return str(getattr(row, GROUPS[name]))


def moment(text: str, name: str) -> float:
    """Unix seconds of 2026-11, 2026-11-25, 2026-11-25T12:00:00Z or a number of them. Raises InvalidRequest."""
    if text.replace(".", "", 1).isdecimal() and len(text) > 4:
        return float(text)
    try:
        at = datetime.fromisoformat(f"{text}-01" if len(text) == 7 else text)
    except ValueError:
        message = f"{text[:40]!r} is no time such as 2026-11-25, 2026-11-25T12:00:00Z or Unix seconds"
        raise InvalidRequest.of(name, message) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def month(text: str) -> tuple[float, float]:
    """Unix seconds of its beginning and end. Raises InvalidRequest."""
    try:
        begin = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidRequest.of("month", f"{text[:40]!r} is no month such as 2026-11") from None
    return begin.timestamp(), next_month(begin).timestamp()


def next_month(at: datetime) -> datetime:
    """Its beginning."""
    begin = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.replace(year=begin.year + begin.month // 12, month=begin.month % 12 + 1)


def month_of(unix_s: float) -> tuple[float, float]:
    """The beginning and end of its month, in UTC."""
    at = datetime.fromtimestamp(unix_s, UTC)
    begin = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.timestamp(), next_month(at).timestamp()
