from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from ledger_sinks import check_sink, check_sums, rows_of
from manylora_shared.ledger.row import UsageRow
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


@pytest.mark.parametrize("made", ["never", "by an earlier version"])
def test_several_open_one_file_at_once(tmp_path: Path, made: str) -> None:
    ready = threading.Barrier(4)

    def put(path: Path, row: UsageRow) -> None:
        sink = SqliteSink(path)
        ready.wait()
        sink.put([row])
        sink.close()

    rows = rows_of(4)
    with ThreadPoolExecutor(4) as threads:
        for number in range(30):  # one open in six was refused before
            path = tmp_path / f"{number}.sqlite"
            if made != "never":
                _earlier(path)
            for done in [threads.submit(put, path, row) for row in rows]:
                done.result()
            assert set(rows) <= set(SqliteSink(path).page(Query(), "", 10).rows)


def _earlier(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE usage (request_id TEXT PRIMARY KEY, tenant TEXT, ended_unix_s REAL)")
        connection.execute("INSERT INTO usage VALUES ('old', 'acme', 1.0)")


def test_a_file_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    _earlier(tmp_path / "usage.sqlite")
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
