from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from ledger_sinks import DAY, check_pages, check_sink, check_sums, rows_of
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.base import SinkDown
from manylora_shared.parquet.usage_files import MERGED, ParquetSink
from pyarrow import parquet as pq


def _files(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.rglob("*.parquet"))


def test_it_is_a_sink(tmp_path: Path) -> None:
    check_sink(lambda: ParquetSink(tmp_path / "new" / "usage"))
    assert (tmp_path / "new" / "usage" / "day=2026-11-25").is_dir()


def test_small_files_become_one_while_others_read_and_write(tmp_path: Path) -> None:
    rows = [row._replace(ended_unix_s=DAY + number % 7) for number, row in enumerate(rows_of(6 * MERGED))]
    sink, done = ParquetSink(tmp_path), threading.Event()
    counts: list[int] = []

    def write(first: int) -> None:
        for number in range(first, len(rows), 2):
            ParquetSink(tmp_path).put(rows[max(0, number - 1) : number + 1])  # each row comes twice

    def read() -> None:
        while not done.is_set():
            counts.append(sum(each.totals["requests"] for each in sink.sums(Query(), ())))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert counts == sorted(counts), "a reader missed rows that were merged meanwhile"
    check_sums(sink, rows)
    check_pages(sink, rows)
    assert len(_files(tmp_path)) <= 2 * MERGED
    assert "1" in _files(tmp_path)


def test_files_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    (tmp_path / "day=2026-11-25").mkdir()
    old = pa.table({"request_id": ["old"], "tenant": ["acme"], "ended_unix_s": [DAY]})
    pq.write_table(old, tmp_path / "day=2026-11-25" / "0-old.parquet")
    (tmp_path / "day=2026-11-25" / "0-new.parquet.part").write_bytes(b"cut")
    (row,) = ParquetSink(tmp_path).page(Query(), "", 10).rows
    assert (row.request_id, row.prompt_tokens, row.key) == ("old", 0, "")


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SinkDown, match="the ledger's Parquet files"):
        ParquetSink(tmp_path / "file" / "usage").put(rows_of(1))
    sink = ParquetSink(tmp_path / "usage")
    sink.put(rows_of(1))
    (file,) = (tmp_path / "usage").rglob("*.parquet")
    file.write_bytes(b"this is no Parquet, however long it may be")
    with pytest.raises(SinkDown, match="the ledger's Parquet files"):
        sink.sums(Query(), ())
