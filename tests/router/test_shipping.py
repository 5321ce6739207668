from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ledger_rig import POINTS, SEGMENT, Kept, MemorySink, Rig, Router
from manylora_router.ledger import shipping
from manylora_router.ledger.log import Lock, segment_path, segments_of
from manylora_router.ledger.sealing import LogSeals
from manylora_router.ledger.shipping import Shipper
from manylora_shared.ledger.frames import NoSeal, frame
from manylora_shared.ledger.records import VERSION, end_record, open_record
from manylora_shared.ledger.row import LOST, UsageRow
from manylora_shared.ledger.usage import Query, summed
from manylora_shared.ledger_sinks.base import Sink, SinkDown
from manylora_shared.ledger_sinks.postgres import PostgresSink
from manylora_shared.ledger_sinks.sqlite import SqliteSink
from manylora_shared.parquet.usage_files import ParquetSink

from tests.postgres_server import PostgresServer

REQUESTS = 100_000  # over all seeds
SEEDS = 8


def _facts(row: UsageRow) -> tuple[object, ...]:
    return row.outcome, row.tenant, row.prompt_tokens, row.completion_tokens


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(1, SEEDS))])
def test_each_request_is_there_once_whatever_dies_where(seed: int, tmp_path: Path) -> None:
    rig = Rig(tmp_path, seed)
    rig.run(REQUESTS // SEEDS)
    found = {request_id: _facts(row) for request_id, row in rig.sink.rows.items()}
    assert found == {request_id: _facts(row) for request_id, row in rig.wanted.items()}
    assert len(found) == REQUESTS // SEEDS - rig.never_synced
    assert min(rig.deaths[point] for point in POINTS) >= 3, rig.deaths
    assert rig.sink.puts > len(found), "nothing was sent twice: it proves little"
    assert sum(row.outcome == LOST for row in rig.sink.rows.values()) > 100
    assert [folder.name for folder in tmp_path.iterdir()] == [f"router-{rig.routers_made}"], "a log was left"


@pytest.fixture
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    server.start()
    yield server
    server.kill()


def _check_each_once(root: Path, sink: Sink, between: Callable[[], None] = lambda: None) -> None:
    kept = Kept(sink, between)
    rig = Rig(root, 1, kept)
    rig.run(600)
    rows = kept.all_rows()
    found = {row.request_id: _facts(row) for row in rows}
    assert found == {request_id: _facts(row) for request_id, row in rig.wanted.items()}
    assert len(rows) == len(found) == 600 - rig.never_synced
    assert kept.puts > 600, "nothing was sent twice: it proves little"
    assert sink.sums(Query(), ("tenant",)) == summed(rig.wanted.values(), ("tenant",))
    sink.close()


def test_sqlite_has_each_row_once(tmp_path: Path) -> None:
    _check_each_once(tmp_path / "logs", SqliteSink(tmp_path / "usage.sqlite"))


def test_parquet_files_have_each_row_once(tmp_path: Path) -> None:
    _check_each_once(tmp_path / "logs", ParquetSink(tmp_path / "usage"))


@pytest.mark.wide
def test_postgresql_that_is_killed_has_each_row_once(tmp_path: Path, postgres: PostgresServer) -> None:
    kills = []

    def kill() -> None:
        if len(kills) < 2:
            kills.append(1)
            postgres.kill()
            try:
                sink.put([_row(0)])
            finally:
                postgres.start()

    sink = PostgresSink(lambda: postgres.dsn)
    _check_each_once(tmp_path / "logs", sink, kill)
    assert kills


def _row(number: int) -> UsageRow:
    return UsageRow(request_id=f"r{number}", tenant="a", outcome="completed", completion_tokens=number)


def test_segments_go_when_their_rows_are_in_the_sink(tmp_path: Path) -> None:
    router = Router(tmp_path, "router", MemorySink())
    for number in range(500):
        while not router.log.append(end_record(_row(number))):
            router.log.sync()
    router.log.sync()
    before = segments_of(router.log.folder)
    router.shipper.ship()
    after = segments_of(router.log.folder)
    assert len(before) > 3 > len(after)
    assert len(router.sink.rows) == 500
    assert router.shipper.has_shipped(*router.log.place)
    router.die()


def test_the_log_of_a_living_router_is_left_alone(tmp_path: Path) -> None:
    sink = MemorySink()
    one, other = Router(tmp_path, "one", sink), Router(tmp_path, "other", sink)
    one.log.append(open_record(_row(1)))
    other.shipper.adopt()
    assert not sink.rows
    one.log.abandon()
    other.shipper.adopt()
    assert sink.rows["r1"].outcome == LOST
    assert not one.log.folder.exists()
    other.die()


def test_what_a_loss_of_power_would_take_back_is_not_sent_yet(tmp_path: Path) -> None:
    sink = MemorySink()
    router = Router(tmp_path, "router", sink)
    router.log.append(open_record(_row(1)))
    router.log.append(end_record(_row(1)))
    router.shipper.ship()
    assert not sink.rows, "it could be lost with its router, and then have another row"
    router.log.sync()
    router.shipper.ship()
    assert list(sink.rows) == ["r1"]
    router.die()


def test_a_torn_tail_is_mended_and_told(tmp_path: Path) -> None:
    sink = MemorySink()
    gone, living = Router(tmp_path, "gone", sink), Router(tmp_path, "living", sink)
    gone.log.append(end_record(_row(1)))
    gone.die(torn=frame(end_record(_row(2)), NoSeal())[:30])
    living.shipper.adopt()
    assert list(sink.rows) == ["r1"]
    assert living.shipper.counts.torn == 1
    living.die()


def test_a_log_of_a_later_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "later"
    Lock(folder).release()
    data = frame(["h", VERSION + 1, []], NoSeal())
    segment_path(folder, 1).write_bytes(data + bytes(SEGMENT - len(data)))
    router = Router(tmp_path, "router", MemorySink())
    with caplog.at_level(logging.ERROR):
        router.shipper.adopt()
    assert segments_of(folder) == [1]
    assert "left alone" in caplog.text
    router.die()


def test_its_thread_goes_on_when_the_sink_is_back(tmp_path: Path) -> None:
    class Away(MemorySink):
        is_away = True

        def put(self, rows: object) -> None:
            if self.is_away:
                raise SinkDown("away")
            super().put(rows)  # type: ignore[arg-type]

    sink = Away()
    router = Router(tmp_path, "router", sink)
    shipper = Shipper(tmp_path, router.log, sink, LogSeals(None), lambda row: row._replace(price_nanos=5), "ship")
    dead = Router(tmp_path, "dead", sink)
    dead.log.append(open_record(_row(7)))
    dead.log.abandon()
    router.log.append(end_record(_row(1)))
    router.log.sync()
    shipper.start()
    assert not shipper.wait_shipped(*router.log.place, 30.0)
    assert shipper.counts.is_down
    sink.is_away = False
    deadline = time.monotonic() + 30
    while not (shipper.has_shipped(*router.log.place) and "r7" in sink.rows):
        assert time.monotonic() < deadline
        shipper.hurry()  # as a read of the ledger does: its pauses grow
        time.sleep(0.01)
    assert not shipper.counts.is_down
    assert (sink.rows["r1"].price_nanos, sink.rows["r7"].price_nanos) == (0, 5)  # a row that is ended has its price
    assert (shipper.counts.shipped, shipper.counts.lost) == (2, 1)
    assert shipper.close(30.0)
    router.die()


def test_folders_that_are_no_logs_or_cannot_be_read_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router(tmp_path, "router", MemorySink())
    foreign, unreadable = tmp_path / "lost+found", tmp_path / "another-uid"
    for folder in (foreign, unreadable):
        folder.mkdir()
    (unreadable / "lock").touch()
    real = shipping.is_log

    def is_log(folder: Path) -> bool:
        if folder == unreadable:
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(shipping, "is_log", is_log)
    for _ in range(2):
        router.shipper.adopt()
    assert foreign.is_dir()
    assert [record.message for record in caplog.records] == [
        "a ledger's log is left alone: [Errno 13] Permission denied"
    ]
    router.die()
