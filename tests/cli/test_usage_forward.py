"""`usage forward`: from a stream to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.opening import open_sink

from tests.cli.conftest import Manylora
from tests.nats_server import NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_rows_are_forwarded(
    manylora: Manylora, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_URL", server.url)
    place = f"sqlite:{tmp_path}/usage.sqlite"
    sink = open_sink(place, "nats:env:NATS_URL")
    sink.put([UsageRow(request_id=f"r{number}", tenant="acme", ended_unix_s=1.0) for number in range(250)])
    assert sink.sums(Query(), ()) == []
    out = await manylora("usage", "forward", "--from", "nats:env:NATS_URL", "--to", place, "--until-empty")
    assert (out.exit_code, out.stdout) == (0, "250 rows forwarded\n")
    (total,) = sink.sums(Query(), ())
    assert total.totals["requests"] == 250
    sink.close()


@pytest.mark.parametrize(
    ("source", "place", "told"),
    [
        ("nats://u:5ecret@db", "sqlite:x", "--from: must be nats:env:NAME"),
        ("nats:env:NOT_THERE", "sqlite:x", "--from: there is nothing in env:NOT_THERE"),
        ("nats:env:HOME", "usage", "is not sqlite:FILE"),
    ],
)
async def test_what_cannot_be_is_told(manylora: Manylora, source: str, place: str, told: str) -> None:
    out = await manylora("usage", "forward", "--from", source, "--to", place)
    assert (out.exit_code, told in out.stderr, "5ecret" in out.stderr) == (2, True, False)
