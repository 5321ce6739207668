"""The ledger in one SQLite file, for routers of one machine: the embedded default.

Several processes write it, each a batch in a transaction; a row's request id is the table's key.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.row import COLUMNS, KINDS, SUMMED, UsageRow
from manylora_shared.ledger.usage import GROUPS, TOTALS, Query, Sum
from manylora_shared.ledger_sinks.base import Page, SinkDown

_BUSY_S = 10.0  # for other writers
_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}
_EMPTY: dict[type, Any] = {str: "''", int: 0, float: 0.0, bool: 0}
_SPLIT_BITS = 30  # large numbers are summed in two parts: SQLite's sums end at 63 bits
_TIMES = {"day": "%Y-%m-%d", "month": "%Y-%m"}
_NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
_PUT = f"INSERT OR IGNORE INTO usage ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))})"


class SqliteSink:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: sqlite3.Connection | None = None

    def put(self, rows: Sequence[UsageRow]) -> None:
        with _told():
            if self._writer is None:
                self._writer = self._opened()
            with self._writer as connection:  # a transaction
                connection.executemany(_PUT, [row.values() for row in rows])

    def page(self, query: Query, after: str, limit: int) -> Page:
        where, given = _where(query)
        if after:
            at, _, request_id = after.partition(" ")
            try:
                given += [float(at), request_id]
            except ValueError:
                raise InvalidRequest.of("after", f"{after[:40]!r} is no page's end") from None
            where += " AND (ended_unix_s, request_id) > (?, ?)"
        order = "ORDER BY ended_unix_s, request_id LIMIT ?"
        with _told(), closing(self._opened()) as connection:
            found = connection.execute(f"SELECT {_NAMES} FROM usage {where} {order}", [*given, limit]).fetchall()
        rows = [UsageRow.of(COLUMNS, values) for values in found]
        last = rows[-1] if len(rows) == limit else None
        return Page(rows, f"{last.ended_unix_s!r} {last.request_id}" if last is not None else "")

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        where, given = _where(query)
        groups = [_group(name) for name in by]
        sums = [part for name in SUMMED for part in _parts(name)]
        wanted = ", ".join([*groups, "count(*)", "sum(degraded)", *sums])
        grouped = f"GROUP BY {', '.join(map(str, range(1, len(by) + 1)))}" if by else "HAVING count(*) > 0"
        with _told(), closing(self._opened()) as connection:
            found = connection.execute(f"SELECT {wanted} FROM usage {where} {grouped}", given).fetchall()
        return sorted((_sum(by, values) for values in found), key=lambda each: tuple(each.group.values()))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")  # in this mode NORMAL can lose the last commits
            _make(connection)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as e:
        raise SinkDown(f"the ledger's SQLite file: {e}", retry_after_s=1.0) from e


def _make(connection: sqlite3.Connection) -> None:
    """Columns that came with a later version are added."""
    known = {name for _, name, *_ in connection.execute("PRAGMA table_info(usage)")}
    if not known:
        columns = ", ".join(f'"{name}" {_type(name)}' for name in COLUMNS if name != "request_id")
        connection.execute(f"CREATE TABLE IF NOT EXISTS usage (request_id TEXT PRIMARY KEY, {columns})")
        connection.execute("CREATE INDEX IF NOT EXISTS usage_by_end ON usage (ended_unix_s, request_id)")
        connection.execute("CREATE INDEX IF NOT EXISTS usage_by_tenant ON usage (tenant, ended_unix_s, request_id)")
        return
    for name in COLUMNS:
        if name not in known:
            connection.execute(f'ALTER TABLE usage ADD COLUMN "{name}" {_type(name)}')


def _type(name: str) -> str:
    kind = KINDS[name]
    return f"{_TYPES[kind]} NOT NULL DEFAULT {_EMPTY[kind]}"


def _where(query: Query) -> tuple[str, list[Any]]:
    parts, given = ["ended_unix_s >= ?"], [query.since_unix_s]
    where: list[Any] = list(given)
    if query.until_unix_s is not None:
        parts.append("ended_unix_s < ?")
        where.append(query.until_unix_s)
    if query.tenant:
        parts.append("tenant = ?")
        where.append(query.tenant)
    return f"WHERE {' AND '.join(parts)}", where


def _group(name: str) -> str:
    if name in _TIMES:
        return f"strftime('{_TIMES[name]}', ended_unix_s, 'unixepoch')"
    return f'"{GROUPS[name]}"'


def _parts(name: str) -> tuple[str, str]:
    return f'sum("{name}" >> {_SPLIT_BITS})', f'sum("{name}" & {(1 << _SPLIT_BITS) - 1})'


def _sum(by: Sequence[str], values: Sequence[Any]) -> Sum:
    group = dict(zip(by, map(str, values), strict=False))
    requests, degraded, *parts = values[len(by) :]
    amounts = [(high << _SPLIT_BITS) + low for high, low in zip(parts[::2], parts[1::2], strict=True)]
    return Sum(group, dict(zip(TOTALS, [requests, degraded, *amounts], strict=True)))
