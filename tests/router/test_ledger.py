from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_rig import MemorySink
from manylora_router.ledger.ledger import Ledger, WhenFull
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import parse_prices
from manylora_shared.ledger.row import LOST, UsageRow
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.base import SinkDown
from manylora_sim.clock import FakeClock

PRICES = "name: p\ncurrency: EUR\nversions:\n- from: 1970-01-01\n  million_completion_tokens: 1\n"


def _ledger(root: Path, sink: MemorySink, name: str, *, when_full: WhenFull = "refuse", segments: int = 1000) -> Ledger:
    return Ledger(
        root,
        sink,
        router_id=name,
        instance=name,
        clock=FakeClock(),
        served=lambda pool: Served(),
        prices=parse_prices(PRICES),
        max_bytes=segments << 13,
        when_full=when_full,
        segment_bytes=1 << 13,
    )


def _row(number: int, **more: object) -> UsageRow:
    return UsageRow(request_id=f"r{number}", tenant="a", began_unix_s=1.0, ended_unix_s=1.0, **more)  # type: ignore[arg-type]


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_rows_are_priced_and_read_as_soon_as_they_are_closed(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, MemorySink(), "one")
    await ledger.start()
    for number in range(20):
        ledger.open(_row(number), lambda: (0, 0, 0, 0, 0))
        ledger.close(_row(number, completion_tokens=2_000_000))
        page = await ledger.page(Query(), "", 100)
        assert len(page.rows) == number + 1
    assert {row.price_nanos for row in page.rows} == {2 * 10**9}
    (total,) = await ledger.sums(Query(), ())
    assert total.totals["requests"] == 20
    await ledger.stop()
    assert os.listdir(tmp_path) == [], "all is sent, and a log was left"


async def test_what_ran_when_the_router_died_is_lost_with_its_notes(tmp_path: Path) -> None:
    sink, given = MemorySink(), [3]
    dead = _ledger(tmp_path, sink, "dead")
    dead.open(_row(1), lambda: (5, 0, given[0], 0, 0))
    dead.note(dead._entries.values())
    given[0] = 9
    for number in range(2, 200):  # segments end, and the next ones begin with what runs
        dead.open(_row(number), lambda: (0, 0, 0, 0, 0))
        dead.close(_row(number))
        dead._log.sync()
    dead._log.abandon()
    ledger = _ledger(tmp_path, sink, "next")
    await ledger.start()
    await _until(lambda: len(sink.rows) == 199)
    lost = sink.rows["r1"]
    assert (lost.outcome, lost.prompt_tokens, lost.completion_tokens, lost.price_nanos) == (LOST, 5, 9, 9000)
    assert ledger.counts.lost == 1
    await ledger.stop()


@pytest.mark.parametrize("when_full", ["refuse", "count"])
async def test_a_sink_that_is_down_holds_nobody_up_until_the_disk_cap(tmp_path: Path, when_full: WhenFull) -> None:
    sink = MemorySink()
    sink.rng = random.Random(1)
    sink.rng.random = lambda: 0.01  # type: ignore[method-assign]  # it is away
    ledger = _ledger(tmp_path, sink, "one", when_full=when_full, segments=4)
    await ledger.start()
    number = 0
    while not ledger.is_full:
        ledger.check_room()
        ledger.close(_row(number := number + 1))
        await asyncio.sleep(0)
    if when_full == "refuse":
        with pytest.raises(ServiceUnavailable, match="no room"):
            ledger.check_room()
    else:
        ledger.check_room()
        while not ledger.num_dropped:
            ledger.close(_row(number := number + 1))
    with pytest.raises(SinkDown):
        sink.put([])
    await _until(lambda: ledger.counts.is_down)
    sink.rng = None
    await _until(lambda: ledger._shipper.hurry() or len(sink.rows) == number - ledger.num_dropped)
    await _until(lambda: not ledger.is_full)
    ledger.check_room()
    await ledger.stop()


async def test_a_router_that_stops_leaves_what_it_could_not_send(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.rng = random.Random(1)
    sink.rng.random = lambda: 0.01  # type: ignore[method-assign]
    ledger = _ledger(tmp_path, sink, "one")
    await ledger.start()
    ledger.close(_row(1))
    await ledger.stop()
    assert not sink.rows
    sink.rng = None
    again = _ledger(tmp_path, sink, "two")
    again._shipper.adopt()
    assert list(sink.rows) == ["r1"]
    again._log.abandon()


async def test_notes_are_kept_of_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_router.ledger.ledger.NOTE_S", 0.001)
    ledger, given = _ledger(tmp_path, MemorySink(), "one"), [0]
    ledger.open(_row(1), lambda: (0, 0, given[0], 0, 0))
    task = asyncio.create_task(ledger.keep_notes())
    before = ledger._log.num_written
    given[0] = 1
    await _until(lambda: ledger._log.num_written > before)
    task.cancel()
    assert ledger._log.num_written <= before + 2  # and not one each time
    ledger._log.abandon()
