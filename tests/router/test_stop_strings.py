"""Stop strings: found as in the whole text, however it is cut."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_router.text.stop_strings import StopStringMatcher, StopStrings


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


def test_a_character_costs_little() -> None:
    """The bound is twenty times what it takes; it is there to see a change of the order of growth."""
    matcher = StopStringMatcher(StopStrings([f"{i:02}" + "a" * 62 for i in range(16)]))
    text = "0aaaa5aaaaa" * 10_000
    started = time.process_time()
    for start in range(0, len(text), 16):
        matcher.push(text[start : start + 16])
    assert time.process_time() - started < 20e-6 * len(text)


def test_what_never_matches_costs_nothing_to_make() -> None:
    """A flood of requests with the most stop strings made a router build a tree of a thousand nodes for each. The bound
    is fifteen times what it takes now, and a third of what it took then.
    """
    stops = [f"{i:02}" + "never said " * 5 for i in range(16)]
    started = time.process_time()
    for _ in range(200):
        StopStrings(stops)
    assert time.process_time() - started < 200 * 120e-6
