"""Pieces to blocks, and calls that broke back to text."""

from __future__ import annotations

from manylora_router.dialect.blocks import Blocks, Kind
from manylora_router.dialect.pieces import CallArguments, CallBegin, CallEnd, Piece, Reasoning, Text

PIECES: list[Piece] = [
    *(Reasoning("a"), Reasoning("b"), Text("c"), CallBegin("f", "<f>"), CallArguments("{")),
    *(Text("d"), CallBegin("g", "<g>"), CallArguments("{"), CallArguments("}"), CallEnd(), Text("e")),
]


def test_pieces_of_a_kind_are_one_block() -> None:
    blocks = Blocks(PIECES)
    kinds = [Kind.REASONING, Kind.TEXT, Kind.CALL, Kind.TEXT, Kind.CALL, Kind.TEXT]
    assert [block.kind for block in blocks.all] == kinds
    assert [block.text for block in blocks.all] == ["ab", "c", "{", "d", "{}", "e"]
    calls = [(call.name, call.number, call.is_whole) for call in blocks.of(Kind.CALL)]
    assert calls == [
        ("f", 0, False),
        ("g", 1, True),
    ]
    assert blocks.has_whole_calls
    assert not Blocks(PIECES[:6]).has_whole_calls


def test_calls_that_broke_are_text() -> None:
    settled = Blocks(PIECES).settled()
    assert [(block.kind, block.text) for block in settled.all] == [
        (Kind.REASONING, "ab"),
        (Kind.TEXT, "c<f>{d"),
        (Kind.CALL, "{}"),
        (Kind.TEXT, "e"),
    ]
    assert [call.number for call in settled.of(Kind.CALL)] == [0]
    assert settled.text_of(Kind.TEXT) == "c<f>{de"
