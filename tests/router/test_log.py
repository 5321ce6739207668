from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from manylora_router.ledger.log import Lock, Log, remove_folder, segment_path, segments_of
from manylora_shared.ledger.frames import NoSeal, records

_SEGMENT = 1 << 12


def _log(folder: Path, *, segments: int = 100, standing: Sequence[Any] = ()) -> Log:
    def stands() -> Iterable[Sequence[Any]]:
        return standing

    return Log(folder, max_bytes=segments * _SEGMENT, seal=NoSeal(), standing=stands, segment_bytes=_SEGMENT)


def _read(folder: Path) -> list[list[Any]]:
    return [
        [each.record for each in records(segment_path(folder, number).read_bytes(), NoSeal())]
        for number in segments_of(folder)
    ]


def test_records_are_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    log = _log(tmp_path / "log")
    assert log.append(["a", 1])
    (header, record), *spare = _read(tmp_path / "log")
    assert (header[0], record, spare) == ("h", ["a", 1], [])
    log.sync()
    assert len(segments_of(tmp_path / "log")) == 2
    log.close()
    assert len(segments_of(tmp_path / "log")) == 1


def test_a_new_segment_begins_with_what_stands(tmp_path: Path) -> None:
    log = _log(tmp_path / "log", standing=[["stands"]])
    for i in range(200):
        assert log.append(["a", i, "x" * 60])
        log.sync()
    log.abandon()
    segments = [found for found in _read(tmp_path / "log") if found]
    assert len(segments) > 3
    assert all([record[0] for record in found[:2]] == ["h", "stands"] for found in segments)
    assert [record[1] for found in segments for record in found[2:]] == list(range(200))


def test_a_cap_is_kept_and_told_before_the_room_ends(tmp_path: Path) -> None:
    log = _log(tmp_path / "log", segments=3)
    taken = 0
    while not log.is_full:
        assert log.append(["a", "x" * 100])
        log.sync()
        taken += 1
    assert len(segments_of(tmp_path / "log")) == 3
    behind = 0
    while log.append(["a", "x" * 100]):
        behind += 1
    assert behind > 10  # for what was begun before
    assert log.num_dropped == 1
    segment_path(tmp_path / "log", 1).unlink()  # it was sent
    assert log.sync()
    assert not log.is_full
    assert log.append(["a", "x" * 100])
    log.close()


def test_its_thread_syncs_and_makes_room(tmp_path: Path) -> None:
    log = _log(tmp_path / "log")
    log.start()
    deadline = time.monotonic() + 30
    for i in range(100):
        while not log.append(["a", i, "x" * 100]):  # it writes faster than segments are made
            assert time.monotonic() < deadline
            time.sleep(0.001)
    log.close()
    written = [record[1] for found in _read(tmp_path / "log") for record in found if record[0] == "a"]
    assert written == list(range(100))


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    log = _log(tmp_path / "log")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    assert len(segments_of(tmp_path / "log")) == 1
    with pytest.raises(OSError, match="No space left"):
        _log(tmp_path / "other")
    Lock(tmp_path / "other").release()  # it let go
    log.abandon()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    log = _log(tmp_path / "log")
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "log")
    log.close()
    lock = Lock(tmp_path / "log")
    remove_folder(tmp_path / "log")
    lock.release()
    assert not (tmp_path / "log").exists()
