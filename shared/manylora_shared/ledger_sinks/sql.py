"""What the ledger's databases have in common: one table, what is asked of it, and rows and sums of what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manylora_shared.ledger.row import COLUMNS, KINDS, SUMMED, UsageRow
from manylora_shared.ledger.usage import GROUPS, TOTALS, Query, Sum
from manylora_shared.ledger_sinks.base import Page, page_end, read_page_end

Statement = tuple[str, list[Any]]
NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
_EMPTY: dict[type, Any] = {str: "''", int: 0, float: 0.0, bool: 0}
_SPLIT_BITS = 30  # large numbers are summed in two parts: SQLite's sums end at 63 bits


@dataclass(frozen=True)
class Dialect:
    table: str
    mark: str  # of a value in a statement
    types: Mapping[type, str]
    times: Mapping[str, str]  # what says the day and the month of an end

    def column(self, name: str) -> str:
        kind = KINDS[name]
        return f'"{name}" {self.types[kind]} NOT NULL DEFAULT {_EMPTY[kind]}'

    @property
    def made(self) -> tuple[str, ...]:
        """The table, where there is none."""
        key = f"request_id {self.types[str]} PRIMARY KEY"
        columns = ", ".join([key, *(self.column(name) for name in COLUMNS if name != "request_id")])
        name = self.table
        return (
            f"CREATE TABLE IF NOT EXISTS {name} ({columns})",
            f"CREATE INDEX IF NOT EXISTS {name}_by_end ON {name} (ended_unix_s, request_id)",
            f"CREATE INDEX IF NOT EXISTS {name}_by_tenant ON {name} (tenant, ended_unix_s, request_id)",
        )

    def added(self, known: Iterable[str]) -> tuple[str, ...]:
        """Columns that came with a later version."""
        lacking = [name for name in COLUMNS if name not in set(known)]
        return tuple(f"ALTER TABLE {self.table} ADD COLUMN {self.column(name)}" for name in lacking)

    def page(self, query: Query, after: str, limit: int) -> Statement:
        """Raises InvalidRequest."""
        where, given = self._where(query)
        if after:
            where += f" AND (ended_unix_s, request_id) > ({self.mark}, {self.mark})"
            given += read_page_end(after)
        order = f"ORDER BY ended_unix_s, request_id LIMIT {self.mark}"
        return f"SELECT {NAMES} FROM {self.table} {where} {order}", [*given, limit]

    def sums(self, query: Query, by: Sequence[str]) -> Statement:
        where, given = self._where(query)
        groups = [self.times.get(name, f'"{GROUPS[name]}"') for name in by]
        wanted = ", ".join([*groups, "count(*)", "sum(degraded)", *(part for name in SUMMED for part in _parts(name))])
        grouped = f"GROUP BY {', '.join(map(str, range(1, len(by) + 1)))}" if by else "HAVING count(*) > 0"
        return f"SELECT {wanted} FROM {self.table} {where} {grouped}", given

    def _where(self, query: Query) -> Statement:
        parts, given = [f"ended_unix_s >= {self.mark}"], [query.since_unix_s]
        where: list[Any] = list(given)
        if query.until_unix_s is not None:
            parts.append(f"ended_unix_s < {self.mark}")
            where.append(query.until_unix_s)
        if query.tenant:
            parts.append(f"tenant = {self.mark}")
            where.append(query.tenant)
        return f"WHERE {' AND '.join(parts)}", where


def page_of(found: Iterable[Sequence[Any]], limit: int) -> Page:
    rows = [UsageRow.of(COLUMNS, values) for values in found]
    return Page(rows, page_end(rows[-1]) if rows and len(rows) == limit else "")


def sums_of(by: Sequence[str], found: Iterable[Sequence[Any]]) -> list[Sum]:
    return sorted((_sum(by, values) for values in found), key=lambda each: tuple(each.group.values()))


def _parts(name: str) -> tuple[str, str]:
    return f'sum("{name}" >> {_SPLIT_BITS})', f'sum("{name}" & {(1 << _SPLIT_BITS) - 1})'


def _sum(by: Sequence[str], values: Sequence[Any]) -> Sum:
    group = dict(zip(by, map(str, values), strict=False))
    requests, degraded, *parts = map(int, values[len(by) :])
    amounts = [(high << _SPLIT_BITS) + low for high, low in zip(parts[::2], parts[1::2], strict=True)]
    return Sum(group, dict(zip(TOTALS, [requests, degraded, *amounts], strict=True)))
