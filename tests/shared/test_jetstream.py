from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_sinks import check_pages, check_sums, rows_of
from manylora_shared.ledger_sinks.base import SinkDown
from manylora_shared.ledger_sinks.jetstream import Forwarder, JetStreamSink, decoded, encoded
from manylora_shared.ledger_sinks.sqlite import SqliteSink

from tests.nats_server import PASSWORD, NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


def _forward(server: NatsServer, path: Path) -> Forwarder:
    sink = SqliteSink(path)
    forwarder = Forwarder(lambda: server.url, sink)
    asyncio.run(forwarder.run(until_empty=True))
    sink.close()
    return forwarder


@pytest.mark.wide
def test_rows_come_through_a_server_that_is_killed_and_are_there_once(server: NatsServer, tmp_path: Path) -> None:
    rows, path = rows_of(600), tmp_path / "usage.sqlite"
    sink, failures = JetStreamSink(lambda: server.url, SqliteSink(path)), list[str]()
    for first in range(0, 600, 60):
        while True:
            try:
                sink.put(rows[max(0, first - 20) : first + 60])  # some come again
            except SinkDown as e:
                failures.append(e.message)
                server.start()
            else:
                break
        if first in (180, 420):
            server.kill()
        if first == 300:
            assert _forward(server, path).rows > 300
    assert len(failures) == 2
    assert not any(PASSWORD in failure for failure in failures)
    assert _forward(server, path).rows > 200
    check_sums(sink, rows)
    check_pages(sink, rows)
    sink.close()


class Away(SqliteSink):
    puts = 0

    def put(self, rows: object) -> None:
        self.puts += 1
        if self.puts <= 2:
            raise SinkDown("the database is away")
        super().put(rows)  # type: ignore[arg-type]


@pytest.mark.wide
def test_what_the_database_does_not_take_waits_in_the_stream(server: NatsServer, tmp_path: Path) -> None:
    rows, away = rows_of(150), Away(tmp_path / "usage.sqlite")
    sink = JetStreamSink(lambda: server.url, SqliteSink(tmp_path / "usage.sqlite"))
    sink.put(rows)
    asyncio.run(Forwarder(lambda: server.url, away).run(until_empty=True))
    assert away.puts >= 3
    check_sums(sink, rows)
    sink.close()
    assert not [each for each in threading.enumerate() if each.name == "ledger-nats"]


def test_a_server_that_is_away_is_told_and_other_messages_are_not_taken() -> None:
    sink = JetStreamSink(lambda: f"nats://manylora:{PASSWORD}@127.0.0.1:1", SqliteSink(Path("unused")))
    with pytest.raises(SinkDown, match="the usage ledger's NATS") as down:
        sink.put(rows_of(1))
    assert PASSWORD not in down.value.message
    sink.close()
    assert decoded(encoded(rows_of(3))) == rows_of(3)
    for data in (b"[]", b"no json", json.dumps({"version": 2, "columns": [], "rows": []}).encode()):
        with pytest.raises(ValueError, match=r"version|Expecting"):
            decoded(data)
