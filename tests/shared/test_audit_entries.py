"""A line is written in one way, and signed over all of it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.audit.entries import (
    GENESIS,
    MAX_TEXT_CHARS,
    Entry,
    NotALine,
    digest,
    is_head_signed,
    is_signed,
    parse,
)

from tests.shared.audit_chains import CHAIN, OTHER, SIGNER

TEXTS = st.text(max_size=400)


@settings(deadline=None, max_examples=100)
@given(
    st.builds(Entry, at_unix_s=st.floats(0, 4e9), action=TEXTS, outcome=TEXTS, who=TEXTS, tenant=TEXTS, target=TEXTS)
)
def test_what_is_written_is_read(entry: Entry) -> None:
    line = SIGNER.line(CHAIN, 3, GENESIS, entry)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read = parse(line[:-1])
    assert (read.chain, read.seq, read.prev) == (CHAIN, 3, GENESIS)
    assert read.entry.target == entry.target[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
    assert is_signed(read, SIGNER.public_key)
    assert not is_signed(read, OTHER.public_key)
    assert not is_signed(dataclasses.replace(read, seq=4), SIGNER.public_key)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300) | st.text('{}[]":,0123456789eE.-nul tf\\', max_size=200).map(str.encode))
def test_other_bytes_are_no_line(data: bytes) -> None:
    with pytest.raises(NotALine):
        parse(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seq":3', b'"seq": 3'),
        (b'"seq":3', b'"seq":3.0'),
        (b'"seq":3', b'"seq":true'),
        (b'"who":"k"', b'"who":7'),
        (b'"who":"k"', b'"who":"\\u006b"'),
        (b'"who":"k"', b'"who":"k","who":"k"'),
        (b'"who":"k"', b'"whom":"k"'),
        (b'"at_unix_s":1.5', b'"at_unix_s":15e-1'),
        (b'"at_unix_s":1.5', b'"at_unix_s":"1.5"'),
    ],
)
def test_another_way_to_write_it_is_no_line(old: bytes, new: bytes) -> None:
    line = SIGNER.line(CHAIN, 3, GENESIS, Entry(at_unix_s=1.5, action="a", outcome="done", who="k"))[:-1]
    assert old in line
    parse(line)
    with pytest.raises(NotALine):
        parse(line.replace(old, new))


def test_a_head_is_signed_over_all_of_it() -> None:
    head = SIGNER.head(CHAIN, 3, "f" * 64, "router-0", 1.5)
    assert is_head_signed(head)
    for change in ({"seq": 4}, {"hash": "e" * 64}, {"chain": "0" * 16}, {"service": "x"}, {"at_unix_s": 2.0}):
        assert not is_head_signed(dataclasses.replace(head, **change))
    assert not is_head_signed(dataclasses.replace(head, public_key=OTHER.public_key))
    assert not is_head_signed(dataclasses.replace(head, signature="no hex"))


def test_nothing_has_no_digest() -> None:
    assert digest(None) == ""
    assert digest(b"") != ""
