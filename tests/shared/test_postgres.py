from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest
from ledger_sinks import check_sink, check_sums, rows_of
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.base import SinkDown
from manylora_shared.ledger_sinks.postgres import PostgresSink, checked

from tests.postgres_server import PASSWORD, PostgresServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    yield server.dsn
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DROP TABLE IF EXISTS manylora_usage")


def test_it_is_a_sink(dsn: str) -> None:
    check_sink(lambda: PostgresSink(lambda: dsn))


def test_it_is_killed_under_rows_and_several_write_them(server: PostgresServer, dsn: str) -> None:
    rows = rows_of(600)
    failures: list[SinkDown] = []
    begun, killed = threading.Event(), threading.Event()

    def write(number: int) -> None:
        sink = PostgresSink(lambda: dsn)
        for first in range(0, 600, 30):
            if first == 300:
                killed.wait(60)
            while True:
                try:
                    sink.put(rows[first + number * 10 : first + number * 10 + 20])  # two writers' overlap
                except SinkDown as e:
                    failures.append(e)
                    threading.Event().wait(0.05)
                else:
                    break
            if first == 150:
                begun.set()
        sink.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    server.kill()
    killed.set()
    server.start()
    for thread in threads:
        thread.join()
    check_sums(PostgresSink(lambda: dsn), rows)
    assert failures
    assert not any(PASSWORD in failure.message for failure in failures)


def test_a_table_of_an_earlier_version_gets_the_columns_that_it_lacks(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(
            'CREATE TABLE manylora_usage (request_id TEXT COLLATE "C" PRIMARY KEY, tenant TEXT, ended_unix_s FLOAT8)'
        )
        connection.execute("INSERT INTO manylora_usage VALUES ('old', 'acme', 1.0)")
    sink = PostgresSink(lambda: dsn)
    rows = rows_of(3)
    sink.put(rows)
    (old, *new) = sink.page(Query(), "", 10).rows
    assert (old.request_id, old.prompt_tokens, old.pool) == ("old", 0, "")
    assert set(new) == set(rows)
    sink.close()


def test_what_is_wrong_is_told_without_the_password() -> None:
    with pytest.raises(ValueError, match="no connection string of PostgreSQL") as wrong:
        checked(f"host {PASSWORD}")
    assert PASSWORD not in str(wrong.value)
    away = PostgresSink(lambda: f"postgresql://manylora:{PASSWORD}@127.0.0.1:1/usage")
    for call in (lambda: away.put(rows_of(1)), lambda: away.sums(Query(), ())):
        with pytest.raises(SinkDown, match="the ledger's PostgreSQL database") as down:
            call()
        assert PASSWORD not in down.value.message
