from __future__ import annotations

import json
from typing import Any

import pytest
from manylora_shared.ledger.records import VERSION, Replay, end_record, header, note_record, open_record, replayed
from manylora_shared.ledger.row import LOST, UsageRow

_ROW = UsageRow(request_id="r", tenant="a", began_unix_s=100.0, ended_unix_s=100.0, prompt_tokens=0)


def _read(*written: Any) -> Replay:
    return replayed(json.loads(json.dumps(each)) for each in (header(), *written))


def test_an_end_is_the_row() -> None:
    end = _ROW._replace(outcome="completed", prompt_tokens=5, completion_tokens=9)
    replay = _read(open_record(_ROW), note_record(101.0, {"r": (5, 0, 3, 0, 0)}), end_record(end))
    assert (replay.take_ended(), replay.take_ended(), replay.lost()) == ([end], [], [])


def test_what_was_opened_and_not_ended_is_lost_with_its_last_note() -> None:
    replay = _read(open_record(_ROW), note_record(101.0, {"r": (5, 1, 3, 2, 1), "unknown": (1, 1, 1, 1, 1)}))
    (lost,) = replay.lost()
    assert (lost.outcome, lost.prompt_tokens, lost.cached_tokens, lost.completion_tokens) == (LOST, 5, 1, 3)
    assert (lost.reused_tokens, lost.resumes, lost.duration_ms, lost.ended_unix_s) == (2, 1, 1000.0, 101.0)
    (unnoted,) = _read(open_record(_ROW)).lost()
    assert unnoted == _ROW._replace(outcome=LOST)


def test_a_segment_begins_again_with_what_runs() -> None:
    opened, noted = open_record(_ROW), note_record(101.0, {"r": (5, 0, 3, 0, 0)})
    once, again = _read(opened, noted), _read(opened, noted, header(), opened, noted)
    assert once.lost() == again.lost()


@pytest.mark.parametrize("record", [["h", VERSION + 1, []], ["x"], 5, ["o"]])
def test_what_it_does_not_know_it_does_not_guess(record: Any) -> None:
    with pytest.raises(ValueError, match="ledger's log"):
        _read(record)


def test_a_row_that_is_told_again_keeps_what_was_noted() -> None:
    row = UsageRow(request_id="r1", tenant="a")
    note = note_record(2.0, {"r1": (5, 0, 7, 0, 0)})
    cut = [open_record(row), note, header(), open_record(row)]  # the next segment ends before its note
    (lost,) = replayed(json.loads(json.dumps(cut))).lost()
    assert (lost.prompt_tokens, lost.completion_tokens) == (5, 7)
