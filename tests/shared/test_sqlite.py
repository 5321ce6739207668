from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from ledger_sinks import check_sink, check_sums, rows_of
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.base import SinkDown
from manylora_shared.ledger_sinks.sqlite import SqliteSink


def test_it_is_a_sink(tmp_path: Path) -> None:
    check_sink(lambda: SqliteSink(tmp_path / "new" / "usage.sqlite"))


def test_several_write_one_file(tmp_path: Path) -> None:
    rows = rows_of(400)

    def write(number: int) -> None:
        sink = SqliteSink(tmp_path / "usage.sqlite")
        for first in range(0, 400, 50):
            sink.put(rows[first + number * 20 : first + number * 20 + 30])  # they overlap
        sink.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_sums(SqliteSink(tmp_path / "usage.sqlite"), rows)


def test_a_file_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE usage (request_id TEXT PRIMARY KEY, tenant TEXT, ended_unix_s REAL)")
        connection.execute("INSERT INTO usage VALUES ('old', 'acme', 1.0)")
    sink = SqliteSink(tmp_path / "usage.sqlite")
    rows = rows_of(3)
    sink.put(rows)
    (old, *new) = sink.page(Query(), "", 10).rows
    assert (old.request_id, old.prompt_tokens, old.pool) == ("old", 0, "")
    assert set(new) == set(rows)
    sink.close()


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "text.sqlite").write_text("this is no database, however long it may be" * 50)
    for path in (tmp_path / "file" / "usage.sqlite", tmp_path / "text.sqlite"):
        with pytest.raises(SinkDown, match="the ledger's SQLite file"):
            SqliteSink(path).put(rows_of(1))
        with pytest.raises(SinkDown):
            SqliteSink(path).sums(Query(), ())
