from __future__ import annotations

import random
from pathlib import Path

import pytest
from manylora_router.ledger.opening import ledger_of
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.sqlite import SqliteSink


async def test_settings_become_a_ledger(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("name: p\ncurrency: EUR\nversions: [{from: 1970-01-01, adapter_load: 1}]")
    place, bits = f"sqlite:{tmp_path}/usage.sqlite", random.Random(1).getrandbits
    opened = ledger_of(place, "", str(prices), max_mb=32, when_full="refuse", getrandbits=bits)
    assert opened is not None
    ledger = opened("router-0", lambda pool: Served())
    assert [folder.name[:9] for folder in (tmp_path / "ledger-log").iterdir()] == ["router-0-"]
    await ledger.start()
    ledger.close(UsageRow(request_id="r", tenant="a", adapter_loads=1))
    await ledger.stop()
    (row,) = SqliteSink(tmp_path / "usage.sqlite").page(Query(), "", 9).rows
    assert (row.price_list, row.price_nanos) == ("p@1970-01-01", 10**9)


def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    bits = random.Random(1).getrandbits
    assert ledger_of("", "", "", max_mb=32, when_full="refuse", getrandbits=bits) is None
    (tmp_path / "prices.yaml").write_text("no list")
    for place, prices, error in (
        ("oracle:x", "", ValueError),
        (f"sqlite:{tmp_path}/u", str(tmp_path / "none.yaml"), OSError),
        (f"sqlite:{tmp_path}/u", str(tmp_path / "prices.yaml"), InvalidRequest),
    ):
        with pytest.raises(error):
            ledger_of(place, "", prices, max_mb=32, when_full="refuse", getrandbits=bits)
