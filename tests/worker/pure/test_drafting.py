"""When a draft model's guesses pay, and how many there are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from manylora_worker.kinds.drafting import MOST_GUESSES, Drafting


def test_guesses_that_are_right_get_more() -> None:
    drafting = Drafting(0.1, 10)
    lengths = []
    for num_tokens in range(10, 40, 5):
        lengths.append(drafting.length(num_tokens))
        drafting.judged(num_tokens, lengths[-1], lengths[-1])
    assert lengths[0] == 2
    assert lengths[-1] == MOST_GUESSES
    drafting.judged(50, 8, 3)
    assert drafting.length(50) == 4


def test_where_nothing_is_right_few_are_tried_and_ever_more_seldom() -> None:
    drafting = Drafting(0.1, 0)
    tried = []
    for num_tokens in range(4000):
        if length := drafting.length(num_tokens):
            drafting.judged(num_tokens, length, 0)
            tried.append(num_tokens)
    assert not drafting.pays
    # Wasted: less than a fiftieth of the steps.
    assert len(tried) < 4000 / 50 / 2
    assert max(b - a for a, b in itertools.pairwise(tried)) > 1000


def test_a_flow_whose_guesses_did_not_pay_begins_with_a_pause() -> None:
    drafting = Drafting(0.1, 7, pays=False)
    assert [drafting.length(7), drafting.length(38), drafting.length(39)] == [0, 0, 2]


def test_guesses_that_cost_as_much_as_they_gain_do_not_pay() -> None:
    drafting = Drafting(1.0, 0)
    for num_tokens in range(0, 20, 5):
        if length := drafting.length(num_tokens):
            drafting.judged(num_tokens, length, length)
    assert not drafting.pays


@given(st.floats(0.01, 2), st.lists(st.integers(0, 8), max_size=60))
def test_it_never_guesses_more_than_it_may(share: float, rights: list[int]) -> None:
    drafting, num_tokens = Drafting(share, 5), 5
    for right in rights:
        length = drafting.length(num_tokens)
        assert 0 <= length <= MOST_GUESSES
        if length:
            drafting.judged(num_tokens, length, min(right, length))
        num_tokens += 1
