"""White space and marks that are held back until it is sure what they are."""

from __future__ import annotations

from collections.abc import Generator

from manylora_router.dialect.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Output,
    Piece,
    Reasoning,
    Stream,
    Text,
    until,
)


def test_space_before_a_call_is_no_text() -> None:
    out = Output()
    out.text("a \n")
    assert out.drain() == [Text("a")]
    out.call("f", "{}", "<f>")
    assert out.drain() == [CallBegin("f", " \n<f>"), CallArguments("{}"), CallEnd()]
    out.text("\n")
    out.finish()
    assert out.drain() == []


def test_space_that_text_follows_is_text() -> None:
    out = Output()
    out.text("a ")
    out.text(" b ")
    out.finish()
    assert out.drain() == [Text("a"), Text("  b"), Text(" ")]
    out.reasoning("c ")
    out.drop_space()
    assert out.drain() == [Reasoning("c")]


def test_a_mark_is_found_however_it_comes() -> None:
    stream, out, found = Stream(), Output(), list[Piece]()

    def read() -> Generator[None]:
        assert (yield from until(stream, out.text, "<m>"))

    reading = read()
    for part in ("a<", "b<m", ">c"):
        stream.text += part
        next(reading, None)
        found += out.drain()
    assert (found, stream.text) == ([Text("a"), Text("<b")], "<m>c")
