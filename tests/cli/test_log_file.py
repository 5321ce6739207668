"""A child's log is bounded while the child has it open."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora.local import log_file
from manylora.local.log_file import LogFile


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogFile:
    monkeypatch.setattr(log_file, "MAX_BYTES", 100)
    return LogFile(tmp_path / "logs" / "svc.log")


def test_what_is_full_is_moved_aside_and_written_on(log: LogFile) -> None:
    with log.begin() as child:
        for turn in range(3):
            child.write(f"turn {turn}\n".encode() + b"x" * 200)
            child.flush()
            log.bound()
            assert log.path.stat().st_size == 0
            assert log.older.read_bytes() == b"x" * 100
        child.write(b"now\n")
        child.flush()
        log.bound()
    assert log.path.read_bytes() == b"now\n"
    assert log.tail(5) == "now"
    assert len(list(log.path.parent.iterdir())) == 2


def test_the_tail_is_of_the_last_start(log: LogFile) -> None:
    for words in (b"first\n", b"second\nlines\n"):
        with log.begin() as child:
            child.write(words)
    assert log.tail(5) == "second\nlines"
    assert log.tail(1) == "lines"
    log.bound()
    assert log.path.read_bytes() == b"first\nsecond\nlines\n"
