"""What a router's log says, and which rows follow from it.

    header   ["h", version, columns]                   first in each segment
    open     ["o", values]                             a worker was found: from now on the request has a row
    note     ["n", unix s, [[id, *amounts], ...]]      what running requests used by then
    end      ["e", values]                             its row

A segment begins with the opens and notes of all that ran when it began, so what lies before it is not needed for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manylora_shared.ledger.row import COLUMNS, LOST, UsageRow

VERSION = 1
NOTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "reused_tokens", "resumes")


def header() -> list[Any]:
    return ["h", VERSION, list(COLUMNS)]


def open_record(row: UsageRow) -> list[Any]:
    return ["o", row.values()]


def end_record(row: UsageRow) -> list[Any]:
    return ["e", row.values()]


def note_record(now_unix_s: float, amounts: Mapping[str, Sequence[int]]) -> list[Any]:
    """amounts: by request id, in the order of NOTED."""
    return ["n", now_unix_s, [[request_id, *each] for request_id, each in amounts.items()]]


@dataclass
class Replay:
    """Reads a log's records in order."""

    columns: Sequence[str] = field(default_factory=lambda: list(COLUMNS))
    running: dict[str, UsageRow] = field(default_factory=dict)
    ended: list[UsageRow] = field(default_factory=list)

    def take(self, record: Any) -> None:
        """Raises ValueError where a newer version wrote it."""
        match record:
            case ["h", int(version), list(columns)]:
                if version > VERSION:
                    raise ValueError(f"the ledger's log is of version {version}, this router reads {VERSION}")
                self.columns = columns
            case ["o", list(values)]:
                row = UsageRow.of(self.columns, values)
                self.running.setdefault(row.request_id, row)  # a segment that is cut may tell it again, and no note
            case ["n", float(now_unix_s) | int(now_unix_s), list(notes)]:
                for request_id, *amounts in notes:
                    self._note(request_id, now_unix_s, amounts)
            case ["e", list(values)]:
                row = UsageRow.of(self.columns, values)
                self.running.pop(row.request_id, None)
                self.ended.append(row)
            case _:
                raise ValueError("the ledger's log has a record that this router does not know")

    def _note(self, request_id: str, now_unix_s: float, amounts: Sequence[int]) -> None:
        row = self.running.get(request_id)
        if row is not None:
            noted: dict[str, Any] = dict(zip(NOTED, amounts, strict=False))
            took_ms = (now_unix_s - row.began_unix_s) * 1e3
            self.running[request_id] = row._replace(**noted, ended_unix_s=now_unix_s, duration_ms=took_ms)

    def take_ended(self) -> list[UsageRow]:
        taken, self.ended = self.ended, []
        return taken

    def lost(self) -> list[UsageRow]:
        """Of what still ran, when nobody writes the log any more."""
        return [row._replace(outcome=LOST) for row in self.running.values()]


def replayed(records: Iterable[Any]) -> Replay:
    replay = Replay()
    for record in records:
        replay.take(record)
    return replay
