"""The ledger in one SQLite file, for routers of one machine: the embedded default.

Several processes write it, each a batch in a transaction; a row's request id is the table's key.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from manylora_shared.ledger.row import COLUMNS, UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.ledger_sinks.base import Page, SinkDown
from manylora_shared.ledger_sinks.sql import NAMES, Dialect, page_of, sums_of

_BUSY_S = 10.0  # for other writers
_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}
_TIMES = {
    "day": "strftime('%Y-%m-%d', ended_unix_s, 'unixepoch')",
    "month": "strftime('%Y-%m', ended_unix_s, 'unixepoch')",
}
_SQL = Dialect("usage", "?", _TYPES, _TIMES)
_PUT = f"INSERT OR IGNORE INTO usage ({NAMES}) VALUES ({', '.join('?' * len(COLUMNS))})"


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
        statement, given = _SQL.page(query, after, limit)
        with _told(), closing(self._opened()) as connection:
            return page_of(connection.execute(statement, given), limit)

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        statement, given = _SQL.sums(query, by)
        with _told(), closing(self._opened()) as connection:
            return sums_of(by, connection.execute(statement, given))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
        try:
            _write_ahead(connection)
            connection.execute("PRAGMA synchronous=FULL")  # in this mode NORMAL can lose the last commits
            if _missing(connection):
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    for statement in _missing(connection):  # another process may have made it meanwhile
                        connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Waits for others as a statement does: SQLite refuses this change at once while one of them reads."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _missing(connection: sqlite3.Connection) -> Sequence[str]:
    """The statements that make the table, or the columns that an earlier version did not have."""
    known = [name for _, name, *_ in connection.execute("PRAGMA table_info(usage)")]
    return _SQL.added(known) if known else _SQL.made


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as e:
        raise SinkDown(f"the ledger's SQLite file: {e}", retry_after_s=1.0) from e
