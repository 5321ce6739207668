from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from ledger_rig import MemorySink
from manylora_router.ledger.ledger import Ledger
from manylora_router.ledger.sealing import LogSeal, LogSeals
from manylora_shared.encryption.keyring import CLUSTER
from manylora_shared.encryption.sealing import SealingKeys
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.frames import frame, records
from manylora_shared.ledger.row import LOST, UsageRow
from manylora_sim.clock import FakeClock

from tests.sealing_keys import MemoryKeys

ROW = UsageRow(request_id="r1", tenant="acme", key="planted-key", adapter="planted-name")


def _ledger(root: Path, sink: MemorySink, name: str, keys: SealingKeys | None) -> Ledger:
    return Ledger(
        root,
        sink,
        router_id=name,
        instance=name,
        clock=FakeClock(),
        served=lambda pool: Served(),
        max_bytes=1 << 20,
        segment_bytes=1 << 14,
        seals=LogSeals(keys),
    )


async def _died(root: Path, keys: SealingKeys | None) -> None:
    """With a row that it had opened."""
    ledger = _ledger(root, MemorySink(), "dead", keys)
    await ledger.start()
    ledger.open(ROW, lambda: (0, 0, 0, 0, 0))
    ledger._shipper.close(10)
    ledger._log.close()


def _files(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


async def test_what_a_dead_router_wrote_is_found_by_who_has_the_keys_and_by_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = MemoryKeys()
    await _died(tmp_path, keys)
    assert b"planted" not in _files(tmp_path)
    assert b"acme" not in _files(tmp_path)
    sink = MemorySink()
    stranger = _ledger(tmp_path, sink, "stranger", None)
    with caplog.at_level(logging.ERROR):
        stranger._shipper.adopt()
    assert "left alone" in caplog.text
    assert not sink.rows
    stranger._log.close()
    knows = _ledger(tmp_path, sink, "knows", keys)
    knows._shipper.adopt()
    assert (sink.rows["r1"].outcome, sink.rows["r1"].adapter) == (LOST, "planted-name")
    assert not (tmp_path / "dead").exists()
    knows._log.close()


async def test_a_log_in_the_clear_is_found_too(tmp_path: Path) -> None:
    await _died(tmp_path, None)
    assert b"planted-name" in _files(tmp_path)
    sink = MemorySink()
    later = _ledger(tmp_path, sink, "later", MemoryKeys())
    later._shipper.adopt()
    assert list(sink.rows) == ["r1"]
    later._log.close()


async def test_its_start_waits_for_the_key_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryKeys):
        asked = 0

        def sealing(self, owner: str) -> object:  # type: ignore[override]
            assert owner == CLUSTER
            self.asked += 1
            if self.asked < 3:
                raise ServiceUnavailable("away", retry_after_s=1.0)
            return super().sealing(owner)

    monkeypatch.setattr("manylora_router.ledger.ledger._RETRY_S", 0.001)
    keys = Away()
    ledger = _ledger(tmp_path, MemorySink(), "one", keys)  # type: ignore[arg-type]
    await ledger.start()
    assert keys.asked == 3
    await ledger.stop()
    assert not _files(tmp_path)


async def test_rows_that_were_sent_do_not_stay_in_the_log(tmp_path: Path) -> None:
    sink = MemorySink()
    ledger = _ledger(tmp_path, sink, "one", None)
    await ledger.start()
    ledger.close(ROW)
    await ledger.flush()
    assert b"planted-name" in _files(tmp_path)
    async with asyncio.timeout(60):
        while ledger._log.current == 1:  # until there is a next segment
            ledger._log.turn()
            await asyncio.sleep(0.005)
        while b"planted-name" in _files(tmp_path):
            await ledger.flush()
    ledger._log.turn()
    assert ledger._log.current == 2, "there is nothing new in it"
    await ledger.stop()


def test_a_record_that_was_changed_ends_the_log() -> None:
    seal = LogSeal(bytes(32))
    first, second = frame(["n", 1.0, []], seal), frame(["n", 2.0, []], seal)
    assert [each.record for each in records(first + second, seal)] == [["n", 1.0, []], ["n", 2.0, []]]
    assert not list(records(first + second, LogSeal(bytes([1]) * 32)))
