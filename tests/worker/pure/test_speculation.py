"""What is guessed by prompt lookup, and when a guess is worth a step."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from manylora_worker.kinds.guessing import MOST_GUESSES
from manylora_worker.kinds.speculation import MOST_READ, MOST_TOKENS, Speculation


def told(speculation: Speculation, tokens: list[int]) -> None:
    for token in tokens:
        speculation.tell(token)


def test_what_followed_the_last_tokens_before_is_guessed_once_it_has_been_right() -> None:
    prompt = list(range(100, 160))
    speculation = Speculation(prompt)
    assert speculation.guess(4) == (), "how often it is right is not known"
    told(speculation, prompt[:30])
    assert speculation.is_worth_it
    assert speculation.guess(4) == prompt[30:34]
    speculation.tell(7)
    assert not speculation.is_worth_it, "it knows no place that it is in"
    assert speculation.guess(4) == ()


def test_text_that_never_repeats_is_never_guessed() -> None:
    rng = random.Random(1)
    speculation = Speculation(rng.sample(range(10**6), 500))
    for token in rng.sample(range(10**6, 2 * 10**6), 500):
        speculation.tell(token)
        assert not speculation.is_worth_it


def test_the_first_guess_is_of_what_followed_the_prompts_last_tokens() -> None:
    prompt = [1, 2, 3, 50, 1, 2, 3, 60, 70, 80, 90, 1, 2, 3]  # 1 2 3 stood in three places
    for following, is_right in ((60, True), (50, False)):
        speculation = Speculation(prompt)
        rate = speculation.rate
        speculation.tell(following)
        assert (speculation.rate > rate) == is_right


def test_a_long_prompt_is_read_in_parts_and_no_farther_back_than_is_remembered() -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(10**6) for _ in range(131_000)]
    speculation = Speculation(prompt)
    parts = [speculation.read_on() for _ in range(2 * MOST_TOKENS // MOST_READ)]
    assert max(parts) == MOST_READ
    assert sum(parts) == MOST_TOKENS - MOST_READ, "the first part was read at once"
    assert parts[-1] == 0
    told(speculation, prompt[-100:-90])
    assert speculation.guess(4) == prompt[-90:-86]


def test_what_is_told_meanwhile_is_read_in_its_turn() -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(10**6) for _ in range(2 * MOST_READ)]
    speculation = Speculation(prompt)
    told(speculation, prompt[:20])
    assert not speculation.is_worth_it, "it is not through: it knows no place"
    assert [speculation.read_on() for _ in range(3)] == [MOST_READ, 20, 0]
    told(speculation, prompt[20:30])
    assert speculation.guess(4) == prompt[30:34]


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    speculation = Speculation([])
    told(speculation, [1, 2, 3, 4, 5] * 8)
    assert speculation.guess(99) == [1, 2, 3, 4, 5, 1, 2, 3]
    assert speculation.guess(1) == [1]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 12))
def test_a_guess_is_what_stood_behind_the_same_tokens(tokens: list[int], most: int) -> None:
    speculation = Speculation([])
    told(speculation, tokens)
    guesses = list(speculation.guess(most))
    assert len(guesses) <= min(most, MOST_GUESSES)
    if guesses:
        assert any(tokens[i] == guesses[0] for i in range(len(tokens)))
