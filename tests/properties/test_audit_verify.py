"""A thousand random changes of a stored audit log are found, and none of a thousand clean logs is accused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from manylora_shared.audit.entries import GENESIS, MENDED, Entry, hash_of, parse
from manylora_shared.audit.verify import Segment, verify
from manylora_shared.coordination.records import AuditHeadRecord

from tests.shared.audit_chains import CHAIN, OTHER, SIGNER, chain, entry

ROUNDS = 1_000
Log = list[Segment]


def with_data(segments: Log, index: int, data: bytes) -> Log:
    changed = list(segments)
    changed[index] = dataclasses.replace(segments[index], data=data)
    return changed


def in_lines(change: Callable[[random.Random, list[bytes]], list[bytes]]) -> Callable[[random.Random, Log], Log]:
    def tampered(rng: random.Random, segments: Log) -> Log:
        index = rng.randrange(len(segments))
        lines = segments[index].data.splitlines(keepends=True)
        return with_data(segments, index, b"".join(change(rng, lines)))

    return tampered


def flip_a_bit(rng: random.Random, segments: Log) -> Log:
    index = rng.randrange(len(segments))
    data = bytearray(segments[index].data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return with_data(segments, index, bytes(data))


def another_byte(rng: random.Random, segments: Log) -> Log:
    index = rng.randrange(len(segments))
    data = bytearray(segments[index].data)
    at = rng.randrange(len(data))
    data[at] = rng.choice([each for each in b'0aA"{ \n\\' if each != data[at]])
    return with_data(segments, index, bytes(data))


def cut_off(rng: random.Random, segments: Log) -> Log:
    index = rng.randrange(len(segments))
    data = segments[index].data
    return with_data(segments[: index + 1], index, data[: rng.randrange(len(data))])


def cut_within(rng: random.Random, segments: Log) -> Log:
    index = rng.randrange(len(segments))
    data = segments[index].data
    first, last = sorted(rng.sample(range(len(data) + 1), 2))
    return with_data(segments, index, data[:first] + data[last:])


def remove(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    del lines[rng.randrange(len(lines))]
    return lines


def repeat(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return lines


def swap(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    if len(lines) < 2:
        return remove(rng, lines)
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def forge(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    """One entry, by a key of the forger's own, with all that follows chained to it anew."""
    at = rng.randrange(len(lines))
    last = parse(lines[at][:-1]).prev
    forged = lines[:at]
    for number, raw in enumerate(lines[at:]):
        line = parse(raw[:-1])
        told = dataclasses.replace(line.entry, who="nobody") if number == 0 else line.entry
        forged.append(OTHER.line(CHAIN, line.seq, last, told))
        last = hash_of(forged[-1])
    return forged


def lose_a_segment(rng: random.Random, segments: Log) -> Log:
    left = list(segments)
    del left[rng.randrange(len(left))]
    return left


def swap_segments(rng: random.Random, segments: Log) -> Log:
    if len(segments) < 2:
        return lose_a_segment(rng, segments)
    first, second = rng.sample(range(len(segments)), 2)
    changed = with_data(segments, first, segments[second].data)
    return with_data(changed, second, segments[first].data)


def all_anew(rng: random.Random, segments: Log) -> Log:
    return chain(rng, 5, signer=OTHER)[0]


def append_forged(rng: random.Random, segments: Log) -> Log:
    """Behind the head, by another key, or not chained to what stands there."""
    data = segments[-1].data
    last = data.splitlines(keepends=True)[-1]
    signer, prev = rng.choice([(OTHER, hash_of(last)), (SIGNER, GENESIS)])
    line = signer.line(CHAIN, parse(last[:-1]).seq + 1, prev, entry(rng))
    return with_data(segments, len(segments) - 1, data + line)


CHANGES: list[Callable[[random.Random, Log], Log]] = [
    flip_a_bit,
    another_byte,
    cut_off,
    cut_within,
    in_lines(remove),
    in_lines(repeat),
    in_lines(swap),
    in_lines(forge),
    lose_a_segment,
    swap_segments,
    all_anew,
    append_forged,
]


def a_chain(rng: random.Random) -> tuple[Log, AuditHeadRecord]:
    num_entries = rng.randrange(2, 12)
    return chain(rng, num_entries, num_segments=rng.randrange(1, min(4, num_entries)))


def test_every_change_is_found() -> None:
    rng = random.Random(35)
    missed = []
    for number in range(ROUNDS):
        segments, head = a_chain(rng)
        change = CHANGES[number % len(CHANGES)]
        tampered = change(rng, segments)
        if [s.data for s in tampered] == [s.data for s in segments]:
            continue
        (report,) = verify(tampered, {CHAIN: head})
        if not report.problems:
            missed.append((number, change.__name__))
    assert missed == []


def test_no_clean_log_is_accused() -> None:
    """Also one that a crash left: with entries behind its head, a line that is cut, or a segment that is empty yet."""
    rng = random.Random(36)
    for _ in range(ROUNDS):
        segments, head = a_chain(rng)
        last = segments[-1].data.splitlines(keepends=True)[-1]
        seq, prev = parse(last[:-1]).seq, hash_of(last)
        data = segments[-1].data
        num_behind = rng.randrange(3)
        for _ in range(num_behind):
            seq += 1
            line = SIGNER.line(CHAIN, seq, prev, entry(rng))
            data, prev = data + line, hash_of(line)
        torn = b""
        if rng.random() < 0.5:
            whole = SIGNER.line(CHAIN, seq + 1, prev, Entry(at_unix_s=1.0, action=MENDED, outcome="told"))
            torn = whole[: rng.randrange(len(whole))]
        segments = with_data(segments, len(segments) - 1, data + torn)
        if not torn and rng.random() < 0.2:
            segments.append(Segment(CHAIN, len(segments) + 1, b""))
        (report,) = verify(segments, {CHAIN: head}, rng.choice([(), (SIGNER.public_key,)]))
        assert report.problems == []
        assert (report.torn_bytes, report.behind_head, report.entries) == (len(torn), num_behind, seq)


def test_without_a_head_all_but_a_missing_end_is_found() -> None:
    rng = random.Random(37)
    segments, _ = chain(rng, 9)
    lines = segments[0].data.splitlines(keepends=True)
    (report,) = verify(with_data(segments, 0, b"".join(lines[:5])), None)
    assert (report.problems, report.is_ended_by_head) == ([], False)
    for changed in (lines[1:], lines[:3] + lines[4:], [*lines[:2], lines[3], lines[2], *lines[4:]]):
        assert verify(with_data(segments, 0, b"".join(changed)), None)[0].problems
    assert verify(segments, None, [OTHER.public_key])[0].problems, "another key than the one that is trusted"
