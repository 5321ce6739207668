from __future__ import annotations

import sqlite3
from contextlib import closing

from manylora_shared.ledger.row import COLUMNS, SUMMED
from manylora_shared.ledger.usage import TOTALS, Query
from manylora_shared.ledger_sinks.sql import Dialect, sums_of

SQL = Dialect("kept", "?", {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}, {"day": "'a day'"})


def test_a_table_that_was_made_lacks_nothing_and_any_other_gets_what_it_lacks() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE kept (request_id TEXT PRIMARY KEY, later TEXT)")
        for statement in SQL.added(["request_id", "later"]):
            connection.execute(statement)
        known = [name for _, name, *_ in connection.execute("PRAGMA table_info(kept)")]
        assert set(known) == {*COLUMNS, "later"}
        assert SQL.added(known) == ()


def test_parts_of_sums_become_one_number() -> None:
    statement, given = SQL.sums(Query("acme", 1.0, 2.0), ("day", "class"))
    assert "GROUP BY 1, 2" in statement
    assert given == [1.0, 2.0, "acme"]
    high, low = 1 << 40, 7
    found = ["2026-11-25", "batch", 3, 1, *([high, low] * len(SUMMED))]
    (told,) = sums_of(("day", "class"), [found])
    assert told.group == {"day": "2026-11-25", "class": "batch"}
    assert told.totals == dict(zip(TOTALS, [3, 1, *[(high << 30) + low] * len(SUMMED)], strict=True))
