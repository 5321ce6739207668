"""Detokenization: all deltas together are the decode of all tokens, and no character comes in halves."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from manylora_router.text.detokenizer import Detokenizer, WindowDetokenizer

PIECES = [b"", b" ", b" a", "日".encode(), "日".encode()[:2], "日".encode()[2:], b"\xff", b"ab", b"\xf0\x9f"]
unicode_text = st.text(st.sampled_from("ab é日🎉\n\u200d"), max_size=30)


def pushed(detokenizer: Detokenizer, ids: Sequence[int], *sizes: int) -> str:
    """The whole text, with the tokens in groups of these sizes and the rest one by one."""
    parts: list[str] = []
    rest = list(ids)
    for size in sizes:
        parts.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    return "".join([*parts, *[detokenizer.push([i]) for i in rest]]) + detokenizer.finish()


def utf8(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@settings(deadline=None)
@given(unicode_text, st.lists(st.integers(0, 9), max_size=8))
def test_whole_characters_come_and_all_of_them(text: str, sizes: list[int]) -> None:
    detokenizer = WindowDetokenizer(utf8)
    rest, whole = list(text.encode()), ""
    for size in sizes:
        whole += detokenizer.push(rest[:size])
        rest = rest[size:]
        assert text.startswith(whole)
    assert whole + detokenizer.push(rest) == text
    assert detokenizer.finish() == ""


def sentencepiece_like(ids: Sequence[int]) -> str:
    """Joins, reads, strips one space of the beginning: what makes a naive difference of decodes go wrong."""
    return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


@settings(deadline=None)
@example([0, 0, 0, 0, 0, 0, 0, 1, 1])
@given(st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=30))
def test_window_gives_what_decoding_everything_gives(ids: list[int]) -> None:
    assert pushed(WindowDetokenizer(sentencepiece_like), ids) == sentencepiece_like(ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([2, 3, 7]), max_size=10))
def test_window_holds_back_characters_in_parts(ids: list[int]) -> None:
    in_parts = [part for i in ids for part in ([4, 5] if i == 3 else [i])]
    detokenizer = WindowDetokenizer(sentencepiece_like)
    for i in in_parts:
        assert "\ufffd" not in detokenizer.push([i])
    assert pushed(WindowDetokenizer(sentencepiece_like), in_parts) == sentencepiece_like(ids)


def test_window_is_bounded_on_endless_garbage() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return sentencepiece_like(ids)

    assert len(pushed(WindowDetokenizer(decode), [6] * 500)) == 500
    assert pushed(WindowDetokenizer(decode), [7] + [0] * 500 + [2]) == "ab a"
    assert longest <= 16


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=30), st.lists(st.integers(0, 9), max_size=8))
def test_window_gives_the_same_however_tokens_are_grouped(ids: list[int], sizes: list[int]) -> None:
    assert pushed(WindowDetokenizer(sentencepiece_like), ids, *sizes) == sentencepiece_like(ids)


def test_a_cut_character_is_told_at_the_end() -> None:
    detokenizer = WindowDetokenizer(utf8)
    assert detokenizer.push(list(b"a\xe6\x97")) == "a"
    assert detokenizer.finish() == "\ufffd"
