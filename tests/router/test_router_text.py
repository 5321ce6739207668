"""Detokenization and stop strings: the text is a function of the tokens, however they come."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_router.text.detokenizer import (
    BytesDetokenizer,
    ChoiceText,
    Detokenizer,
    StopStringMatcher,
    StopStrings,
    TextDelta,
    TokenBytes,
    WindowDetokenizer,
)

BYTES = TokenBytes([bytes([b]) for b in range(256)])
PIECES = TokenBytes(
    [b"", b" ", b" a", "日".encode(), "日".encode()[:2], "日".encode()[2:], b"\xff", b"ab", b"\xf0\x9f"]
)
unicode_text = st.text(st.sampled_from("ab é日🎉\n\u200d\ufffd"), max_size=30)


def pushed(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()


@settings(deadline=None)
@given(unicode_text)
def test_bytes_give_the_text_back_and_never_half_a_character(text: str) -> None:
    detokenizer = BytesDetokenizer(BYTES)
    whole = ""
    for token in text.encode():
        whole += detokenizer.push(token)
        assert text.startswith(whole)
    assert whole == text
    assert detokenizer.finish() == ""


@settings(deadline=None)
@given(st.lists(st.integers(0, 8), max_size=30))
def test_bytes_are_the_utf8_reading_of_the_pieces(ids: list[int]) -> None:
    joined = b"".join(PIECES.pieces[i] for i in ids)
    assert pushed(BytesDetokenizer(PIECES), ids) == joined.decode("utf-8", "replace")


@pytest.mark.parametrize(("ids", "text"), [([1, 2], " a"), ([2, 2], "a a"), ([0, 2], "a"), ([7, 2], "ab a"), ([], "")])
def test_one_leading_space_is_stripped_where_the_encoding_adds_it(ids: list[int], text: str) -> None:
    assert pushed(BytesDetokenizer(TokenBytes(PIECES.pieces, strips_first_space=True)), ids) == text


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert pushed(BytesDetokenizer(PIECES), [7, 1000, 7]) == "abab"


def sentencepiece_like(ids: Sequence[int]) -> str:
    """Joins, reads, strips one space of the beginning: what makes a naive difference of decodes go wrong."""
    return b"".join(PIECES.pieces[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=30))
def test_window_gives_what_decoding_everything_gives(ids: list[int]) -> None:
    assert pushed(WindowDetokenizer(sentencepiece_like), ids) == sentencepiece_like(ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([2, 3, 7]), max_size=10))
def test_window_holds_back_characters_in_parts(ids: list[int]) -> None:
    in_parts = [part for i in ids for part in ([4, 5] if i == 3 else [i])]
    detokenizer = WindowDetokenizer(sentencepiece_like)
    for i in in_parts:
        assert "\ufffd" not in detokenizer.push(i)
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


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The first end of a match wins; of several there, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


stop_lists = st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abé"), max_size=40), stop_lists, st.data())
def test_stop_strings_are_found_as_in_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopStringMatcher(StopStrings(stops))
    given_out, rest = "", text
    while rest and matcher.matched is None:
        size = data.draw(st.integers(1, len(rest)))
        given_out += matcher.push(rest[:size])
        rest = rest[size:]
        expected, _ = oracle(text, stops)
        assert expected.startswith(given_out)
    if matcher.matched is None:
        given_out += matcher.finish()
    assert (given_out, matcher.matched) == oracle(text, stops)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab"), max_size=40), stop_lists)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(StopStrings(stops))
    given_out = ""
    for index, character in enumerate(text):
        given_out += matcher.push(character)
        if matcher.matched is not None:
            return
        held = text[len(given_out) : index + 1]
        assert held == "" or any(s.startswith(held) for s in stops)


@settings(max_examples=150, deadline=None)
@given(unicode_text, st.lists(st.sampled_from(["a", "b é", "é日", "🎉", "\n\n"]), max_size=3), st.data())
def test_any_grouping_of_tokens_is_the_same_choice(text: str, stops: list[str], data: st.DataObject) -> None:
    """Text, stop string and the number of tokens that count do not depend on how tokens came in frames."""
    ids = list(text.encode())

    def run(groups: list[list[int]]) -> tuple[str, int, str | None]:
        choice = ChoiceText(BytesDetokenizer(BYTES), StopStrings(stops) if stops else None)
        out, count = "", 0
        for group in groups:
            delta = choice.push(group)
            out, count = out + delta.text, count + delta.num_tokens
            if delta.stop_string is not None:
                return out, count, delta.stop_string
        rest = choice.finish()
        return out + rest.text, count, rest.stop_string

    groups: list[list[int]] = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        groups.append(rest[:size])
        rest = rest[size:]
    grouped = run(groups)
    assert grouped == run([[i] for i in ids]) == run([ids])
    expected, stop = oracle(text, stops)
    assert (grouped[0], grouped[2]) == (expected, stop)
    assert grouped[1] == len((expected + stop).encode() if stop else ids)


def test_a_stop_string_may_be_completed_by_the_last_replacement_character() -> None:
    choice = ChoiceText(BytesDetokenizer(BYTES), StopStrings(["\ufffd"]))
    assert choice.push(list(b"a\xe6")) == TextDelta("a", 2)
    assert choice.finish() == TextDelta("", 0, "\ufffd")


def test_a_token_costs_microseconds() -> None:
    """The bound is twenty times what it takes; it is there to see a change of the order of growth."""
    stops = StopStrings([f"{i:02}" + "a" * 62 for i in range(16)])
    choice = ChoiceText(BytesDetokenizer(BYTES), stops)
    ids = list(b"0aaaa5aaaaa" * 10_000)
    started = time.process_time()
    for start in range(0, len(ids), 16):
        choice.push(ids[start : start + 16])
    assert time.process_time() - started < 20e-6 * len(ids)
