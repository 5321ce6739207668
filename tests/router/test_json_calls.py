"""One call, or a list of them, and what is left of the text."""

from __future__ import annotations

import pytest
from manylora_router.dialect.json_calls import json_calls
from manylora_router.dialect.pieces import CallArguments, CallBegin, CallEnd, Output, Piece, Stream

F = '{"name": "f", "arguments": {}}'


def read(text: str) -> tuple[bool, list[Piece], str]:
    stream, out = Stream(), Output()
    stream.text, stream.is_over = text, True
    reading = json_calls(stream, out, {"f": {}}, 0)
    with pytest.raises(StopIteration) as ended:
        next(reading)
    return ended.value.value, out.drain(), stream.text


@pytest.mark.parametrize(
    ("text", "count", "left"),
    [
        (f"{F} x", 1, " x"),
        (f"[{F}]x", 1, "x"),
        (f"[ {F} , {F} ] x", 2, " x"),
        (f"[{F}, 7]", 1, ", 7]"),
        (f"[{F}", 1, ""),
        ('{"parameters": {}, "name": "f"}', 1, ""),
        ('{"name": "f", "arguments": {}} }', 1, " }"),
        ('{"name": "f", "arguments": {} oops', 1, " oops"),
    ],
)
def test_calls_are_taken_off_the_stream(text: str, count: int, left: str) -> None:
    was_read, pieces, rest = read(text)
    assert (was_read, sum(isinstance(piece, CallEnd) for piece in pieces), rest) == (True, count, left)
    assert sum(isinstance(piece, CallBegin) for piece in pieces) == count
    assert {piece.text for piece in pieces if isinstance(piece, CallArguments)} == {"{}"}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"name": "g", "arguments": {}}', '{"arguments": {}}', '{"name"'])
def test_what_is_none_is_left(text: str) -> None:
    assert read(text) == (False, [], text)
