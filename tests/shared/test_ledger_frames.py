from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.ledger.frames import NoSeal, frame, is_torn, records

_RECORDS = st.lists(st.lists(st.one_of(st.integers(), st.text(max_size=8)), min_size=1, max_size=4), max_size=5)


class _Turned:
    """A seal: each byte is another one."""

    def close(self, plain: bytes) -> bytes:
        return bytes(255 - byte for byte in plain)

    open = close


@given(_RECORDS, st.data())
def test_what_was_written_whole_is_read_and_nothing_else(
    given_records: list[list[object]], data: st.DataObject
) -> None:
    frames = [frame(each, NoSeal()) for each in given_records]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    torn = whole[:cut] + bytes(len(whole) - cut + 64)  # the segment is made of zeros
    read = list(records(torn, NoSeal()))
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    assert len(read) >= sum(end <= cut for end in ends)  # a cut tail of zeros may be the very bytes
    assert [each.record for each in read] == given_records[: len(read)]
    assert [each.end for each in read] == ends[: len(read)]


@given(_RECORDS.filter(bool), st.data())
def test_a_changed_byte_ends_the_reading_before_it(given_records: list[list[object]], data: st.DataObject) -> None:
    frames = [frame(each, NoSeal()) for each in given_records]
    whole = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    read = [each.record for each in records(bytes(whole), NoSeal())]
    before = sum(sum(map(len, frames[: i + 1])) <= at for i in range(len(frames)))
    assert read[:before] == given_records[:before]
    assert len(read) == before


def test_what_was_begun_and_not_ended_is_told() -> None:
    whole = frame(["a"], NoSeal())
    assert not is_torn(whole + bytes(100), len(whole))
    assert is_torn(whole + whole[:9] + bytes(100), len(whole))


def test_a_seal_stands_between_records_and_bytes() -> None:
    sealed = frame(["a secret"], _Turned())
    assert b"secret" not in sealed
    assert [each.record for each in records(sealed, _Turned())] == [["a secret"]]
    assert not list(records(sealed, NoSeal()))
