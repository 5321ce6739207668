"""The ledger in a PostgreSQL database, for routers of any number of machines.

A batch is a statement that leaves out what is there already; a row's request id is the table's key. The one place that
needs psycopg.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from manylora_shared.ledger.row import COLUMNS, KINDS, UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.ledger_sinks.base import Page, SinkDown
from manylora_shared.ledger_sinks.sql import NAMES, Dialect, page_of, sums_of

TABLE = "manylora_usage"
_CONNECT_S = 5
_STATEMENT_S = 30
_READERS = 4  # connections at a time, for all who read through this router
_TYPES = {str: 'TEXT COLLATE "C"', int: "BIGINT", float: "DOUBLE PRECISION", bool: "SMALLINT"}
_ARRAYS = {str: "text[]", int: "bigint[]", float: "float8[]", bool: "smallint[]"}
_AT = "to_timestamp(ended_unix_s) AT TIME ZONE 'UTC'"
_TIMES = {"day": f"to_char({_AT}, 'YYYY-MM-DD')", "month": f"to_char({_AT}, 'YYYY-MM')"}
_SQL = Dialect(TABLE, "%s", _TYPES, _TIMES)
_GIVEN = ", ".join(f"%s::{_ARRAYS[KINDS[name]]}" for name in COLUMNS)
_PUT = f"INSERT INTO {TABLE} ({NAMES}) SELECT * FROM unnest({_GIVEN}) ON CONFLICT (request_id) DO NOTHING"
_KNOWN = f"SELECT column_name FROM information_schema.columns WHERE table_schema = ANY (current_schemas(false)) AND table_name = '{TABLE}'"  # noqa: E501
_MAKING = 0x6D6C7573  # one process makes the table at a time
# A dead line is found in half a minute, and no setting of the server's makes a commit that a loss of power takes back.
_LINE: dict[str, Any] = {
    "connect_timeout": _CONNECT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms, of what was sent and is not acknowledged
}
_SURE = ("SET LOCAL synchronous_commit = on", f"SET LOCAL statement_timeout = '{_STATEMENT_S}s'")


def checked(dsn: str) -> str:
    """Raises ValueError."""
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # whose words would tell the password
        raise ValueError("--ledger: what postgresql: names is no connection string of PostgreSQL") from None
    return dsn


class PostgresSink:
    def __init__(self, dsn: Callable[[], str]) -> None:
        """dsn: asked for each connection, so that a new password is heard of. Raises ValueError, OSError."""
        self._dsn = dsn
        self._writer: psycopg.Connection[Any] | None = None
        self._places = threading.BoundedSemaphore(_READERS)

    def put(self, rows: Sequence[UsageRow]) -> None:
        if not rows:
            return
        # In the order of their ids: two routers that send the same rows wait for one another in one direction.
        values = sorted(row.values() for row in rows)
        columns = [
            list(map(_PUT_AS[name], column)) for name, column in zip(COLUMNS, zip(*values, strict=True), strict=True)
        ]
        try:
            with _told():
                if self._writer is None or self._writer.closed:
                    self._writer = self._opened()
                _run(self._writer, _PUT, columns)
        except SinkDown:
            self.close()
            raise

    def page(self, query: Query, after: str, limit: int) -> Page:
        statement, given = _SQL.page(query, after, limit)
        return page_of(self._asked(statement, given), limit)

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        statement, given = _SQL.sums(query, by)
        return sums_of(by, self._asked(statement, given))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _asked(self, statement: str, given: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._places, _told():
            connection = self._opened()
            try:
                return _run(connection, statement, given)
            finally:
                connection.close()

    def _opened(self) -> psycopg.Connection[Any]:
        # Statements are not prepared: a pooler between may give each transaction another server.
        connection = psycopg.connect(checked(self._dsn()), autocommit=True, prepare_threshold=None, **_LINE)
        try:
            known = [name for (name,) in _run(connection, _KNOWN)]
            for statement in _SQL.added(known) if known else _SQL.made:
                self._make(connection, statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self, connection: psycopg.Connection[Any], statement: str) -> None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
            connection.execute(statement.replace("ADD COLUMN", "ADD COLUMN IF NOT EXISTS"))


def _run(connection: psycopg.Connection[Any], statement: str, given: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    with connection.transaction():
        for each in _SURE:
            connection.execute(each)
        cursor = connection.execute(statement, given)
        return cursor.fetchall() if cursor.description is not None else []


def _text(value: str) -> str:
    return value.replace("\0", "")  # which no text of PostgreSQL has


_PUT_AS: dict[str, Callable[[Any], Any]] = {
    name: _text if kind is str else (int if kind is bool else kind) for name, kind in KINDS.items()
}


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, OSError, ValueError) as e:
        told = " ".join(str(e).split())
        raise SinkDown(f"the ledger's PostgreSQL database: {told}", retry_after_s=1.0) from None
