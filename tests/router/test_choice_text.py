"""The text of a choice: a function of its tokens, however they come in frames."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_router.text.choice_text import ChoiceText, TextDelta
from manylora_router.text.stop_strings import StopStrings
from manylora_sim.fake_text import FakeDetokenizer
from test_stop_strings import oracle

unicode_text = st.text(st.sampled_from("ab é日🎉\n\u200d\ufffd"), max_size=30)


@settings(max_examples=150, deadline=None)
@given(unicode_text, st.lists(st.sampled_from(["a", "b é", "é日", "🎉", "\n\n"]), max_size=3), st.data())
def test_any_grouping_of_tokens_is_the_same_choice(text: str, stops: list[str], data: st.DataObject) -> None:
    """Text, stop string and the number of tokens that count do not depend on how tokens came in frames."""
    ids = list(text.encode())

    def run(groups: list[list[int]]) -> tuple[str, int, str | None]:
        choice = ChoiceText(FakeDetokenizer(), StopStrings(stops) if stops else None)
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


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab"), max_size=30), st.lists(st.sampled_from(["a", "ab", "bba", "abab"]), max_size=3))
def test_no_stop_string_ends_in_the_first_tokens(text: str, stops: list[str]) -> None:
    for min_tokens in range(0, 12, 3):
        choice = ChoiceText(FakeDetokenizer(), StopStrings(stops) if stops else None, min_tokens)
        delta = choice.push(list(text.encode()))
        rest = choice.finish().text if delta.stop_string is None else ""
        ends = [end for end in range(min_tokens + 1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
        if not ends:
            assert (delta.text + rest, delta.stop_string) == (text, None)
            continue
        longest = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        want = (text[: ends[0] - len(longest)], ends[0], longest)
        assert (delta.text, delta.num_tokens, delta.stop_string) == want


def test_a_stop_string_may_be_completed_by_the_last_replacement_character() -> None:
    choice = ChoiceText(FakeDetokenizer(), StopStrings(["\ufffd"]))
    assert choice.push(list(b"a\xe6")) == TextDelta("a", 2)
    assert choice.finish() == TextDelta("", 0, "\ufffd")
