"""Whether a chain is what was written: nothing changed, removed, moved or cut off. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from manylora_shared.audit.entries import BEGAN, GENESIS, Line, NotALine, hash_of, is_head_signed, is_signed, parse
from manylora_shared.coordination.records import AuditHeadRecord

_SEGMENT = re.compile(r"([0-9a-f]{16})-([0-9]{6})\.jsonl")
MAX_PROBLEMS = 20  # told of a chain; one change can make all that follows wrong


@dataclass(frozen=True)
class Segment:
    chain: str
    number: int  # from 1
    data: bytes

    @property
    def name(self) -> str:
        return segment_name(self.chain, self.number)


@dataclass
class ChainReport:
    chain: str
    entries: int = 0
    behind_head: int = 0  # written, and not yet in the signed head
    torn_bytes: int = 0  # of a last line that a crash cut
    unfinished: int = 0  # acts that were to be done, and of which nothing tells how they ended
    is_ended_by_head: bool = False  # False: what was cut off at its end cannot be seen
    problems: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where}: {what}")


def segment_name(chain: str, number: int) -> str:
    return f"{chain}-{number:06d}.jsonl"


def segment_of(name: str) -> tuple[str, int] | None:
    """Chain and number of a file's name."""
    match = _SEGMENT.fullmatch(name)
    return (match[1], int(match[2])) if match is not None else None


def verify(
    segments: Sequence[Segment], heads: Mapping[str, AuditHeadRecord] | None, public_keys: Sequence[str] = ()
) -> list[ChainReport]:
    """Args:
    heads: by chain; None: there are none to compare with.
    public_keys: of those that may have signed; none: whose key a chain's head names, or else its first entry."""
    chains = sorted({segment.chain for segment in segments} | set(heads or ()))
    return [_verify(chain, [s for s in segments if s.chain == chain], heads, public_keys) for chain in chains]


def end_of(segments_back: Iterable[Segment], head: AuditHeadRecord) -> tuple[int, str]:
    """The number and hash of a chain's last whole line, if it goes on from what its head signs. Reads no further back.

    Args:
        segments_back: from the last one.

    Raises:
        NotALine: it does not.
    """
    found: list[tuple[Line, str]] = []
    for segment in segments_back:
        whole = segment.data[: segment.data.rfind(b"\n") + 1].splitlines(keepends=True)
        found = [*((parse(raw[:-1]), hash_of(raw)) for raw in whole), *found]
        if found and found[0][0].seq <= head.seq:
            break
    behind = [each for each in found if each[0].seq >= head.seq]
    if not behind or behind[0][0].seq != head.seq or behind[0][1] != head.hash or not is_head_signed(head):
        raise NotALine(f"entry {head.seq}, which its head signs, is gone or changed")
    for (_, last), (line, _) in itertools.pairwise(behind):
        if line.prev != last or not is_signed(line, head.public_key):
            raise NotALine(f"entry {line.seq} does not follow the one before it")
    return behind[-1][0].seq, behind[-1][1]


def _verify(
    chain: str, segments: list[Segment], heads: Mapping[str, AuditHeadRecord] | None, public_keys: Sequence[str]
) -> ChainReport:
    report = ChainReport(chain)
    head = heads.get(chain) if heads is not None else None
    if head is not None and not _is_right_head(head, chain, public_keys):
        report.add("head", "its signature is not right")
    if not segments:
        report.add("files", f"are gone; the head counts {head.seq if head is not None else 0} entries")
        return report
    if heads is not None and head is None:
        report.add("head", "there is none, so what was cut off at the end cannot be seen")
    keys = public_keys or ([head.public_key] if head is not None else [])
    open_requests: dict[tuple[str, str], int] = {}
    before, seq = GENESIS, 0
    head_hash = ""
    for where, line, raw in _lines(segments, report):
        seq += 1
        if line.seq != seq or line.prev != before or line.chain != chain:
            report.add(where, f"entry {line.seq} does not follow entry {seq - 1}")
            seq = line.seq
        if seq == 1:
            if line.entry.action != BEGAN:
                report.add(where, "the chain does not begin here")
            keys = keys or [line.entry.detail]
        if not any(is_signed(line, key) for key in keys):
            report.add(where, f"entry {line.seq} is not signed by the log's key")
        before = hash_of(raw)
        if head is not None and seq == head.seq:
            head_hash = before
        _note_outcome(open_requests, line)
        report.entries += 1
    report.unfinished = sum(open_requests.values())
    if head is not None:
        report.is_ended_by_head = True
        report.behind_head = max(0, seq - head.seq)
        if head_hash != head.hash:
            told = "another one stands there" if head_hash else "it is gone, with what followed"
            report.add("head", f"it counts {head.seq} entries and signs the last of them: {told}")
    return report


def _is_right_head(head: AuditHeadRecord, chain: str, public_keys: Sequence[str]) -> bool:
    return head.chain == chain and is_head_signed(head) and (not public_keys or head.public_key in public_keys)


def _lines(segments: list[Segment], report: ChainReport) -> Iterator[tuple[str, Line, bytes]]:
    """Where it stands, what it says, and its bytes."""
    ordered = sorted(segments, key=lambda each: each.number)
    for position, segment in enumerate(ordered):
        if segment.number != position + 1:
            report.add(segment.name, f"segment {position + 1} is gone")
        *whole, rest = segment.data.split(b"\n")
        for number, text in enumerate(whole, start=1):
            where = f"{segment.name}:{number}"
            try:
                yield where, parse(text), text + b"\n"
            except NotALine as e:
                report.add(where, str(e))
        if rest and segment is ordered[-1]:
            report.torn_bytes = len(rest)
        elif rest:
            report.add(segment.name, "its last line is cut")


def _note_outcome(found: dict[tuple[str, str], int], line: Line) -> None:
    entry = line.entry
    key = (entry.action, entry.request)
    if entry.outcome == "intent":
        found[key] = found.get(key, 0) + 1
    elif entry.outcome in ("done", "failed"):
        found.pop(key, None)
