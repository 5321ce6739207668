from __future__ import annotations

from pathlib import Path

from ledger_sinks import check_sink, check_sums, rows_of
from manylora_shared.encryption.names import UNREADABLE, NameSeal
from manylora_shared.encryption.sealing import DataKey
from manylora_shared.errors import NotFound
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.sealed import SealedSink
from manylora_shared.ledger_sinks.sqlite import SqliteSink

from tests.sealing_keys import MemoryKeys


def _named(count: int) -> list[object]:
    return [row._replace(key="k-of-acme", adapter="planted-name", trace_id="planted-trace") for row in rows_of(count)]


def test_it_is_a_sink(tmp_path: Path) -> None:
    keys = MemoryKeys()
    check_sink(lambda: SealedSink(SqliteSink(tmp_path / "usage.sqlite"), NameSeal(keys)))


def test_rows_from_before_and_behind_its_time_are_read(tmp_path: Path) -> None:
    rows, keys, inner = rows_of(90), MemoryKeys(), SqliteSink(tmp_path / "usage.sqlite")
    SealedSink(inner, NameSeal(None)).put(rows[:30])
    SealedSink(inner, NameSeal(keys)).put(rows[20:])
    check_sums(SealedSink(inner, NameSeal(keys)), rows)
    inner.close()


def test_names_are_in_no_file_and_amounts_outlast_the_tenant(tmp_path: Path) -> None:
    keys, inner = MemoryKeys(), SqliteSink(tmp_path / "usage.sqlite")
    sink, rows = SealedSink(inner, NameSeal(keys)), _named(20)
    sink.put(rows)  # type: ignore[arg-type]
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [name for name in (b"k-of-acme", b"planted-name", b"planted-trace") if name in stored]
    assert sink.page(Query(), "", 100).rows == sorted(rows, key=lambda row: (row.ended_unix_s, row.request_id))  # type: ignore[attr-defined]
    before = sink.sums(Query("acme"), ("tenant",))
    keys.destroy("acme")
    assert sink.sums(Query("acme"), ("tenant",)) == before
    (lost,) = sink.sums(Query("acme"), ("adapter",))
    assert lost.group == {"adapter": UNREADABLE}
    (kept,) = sink.sums(Query("globex"), ("adapter",))
    assert kept.group == {"adapter": "planted-name"}
    sink.close()


def test_a_row_that_comes_behind_its_tenants_deletion_has_no_names(tmp_path: Path) -> None:
    class Gone(MemoryKeys):
        def sealing(self, owner: str) -> DataKey:
            raise NotFound(f"tenant {owner} is not known")

    sink = SealedSink(SqliteSink(tmp_path / "usage.sqlite"), NameSeal(Gone()))
    sink.put(_named(1))  # type: ignore[arg-type]
    (row,) = sink.page(Query(), "", 9).rows
    assert (row.adapter, row.key) == (UNREADABLE, UNREADABLE)
    sink.close()
