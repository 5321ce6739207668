"""When guesses pay, and what it costs to find out: never much more than without, never much less than always."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_worker.kinds.guessing import MOST_GUESSES, MOST_SPECULATING, FlowGuesses, Guessing, GuessTimes, Turn

# Of one flow, against plain steps only: a 64th, and what trials of one debt lose. There are four at most, each of three
# plain steps, its last step of nine rows, and the step behind it.
PROBING = 1 / 64
TRIALS = 4 * (3 + 12 + 3)
LONGEST_PAUSE = 512 * 4  # tokens, where a step with wrong guesses loses less than one


def known(rows: int = 1) -> GuessTimes:
    times = GuessTimes()
    times.rows = rows
    for _ in range(3):
        times.plain(1.0)
    return times


@dataclass
class Played:
    tokens: int = 0
    seconds: float = 0.0
    guessed_at: list[int] = field(default_factory=list)


def play(
    num_tokens: int,
    accepts: Callable[[int], float],
    cost: Callable[[int], float],
    rng: random.Random,
    *,
    rate: Callable[[int], float] = lambda position: 0.0,
    flow: FlowGuesses | None = None,
    behind: float = 1.0,
) -> Played:
    """One sequence where a plain step takes a second. accepts: by position, how many guesses are right; cost: seconds
    of a step, by its guesses; behind: of the plain one after it.
    """
    times, played, was_guessing = known(), Played(), False
    guessing = Guessing(times, flow or FlowGuesses(), 4)
    while played.tokens < num_tokens:
        length = guessing.length(rate(played.tokens))
        right = 0
        while right < length and rng.random() < accepts(played.tokens):
            right += 1
        seconds = cost(length) if length else behind if was_guessing else 1.0
        if length:
            played.guessed_at.append(played.tokens)
        turn = guessing.begins(guesses=length > 0)
        if turn is Turn.PLAIN:
            times.plain(seconds)
        else:
            guessing.judged(length, right)
        told = 1.0 if turn is Turn.PLAIN else times.cost(length, seconds)
        guessing.drew(turn, 1 + right, told, rate(played.tokens))
        was_guessing = length > 0
        played.tokens += 1 + right
        played.seconds += seconds
    return played


def always(num_tokens: int, accept: float, cost: Callable[[int], float], rng: random.Random) -> float:
    """Seconds a token, where each step has guesses."""
    length, tokens, seconds = 4, 0, 0.0
    while tokens < num_tokens:
        right = 0
        while right < length and rng.random() < accept:
            right += 1
        seconds += cost(length)
        tokens += 1 + right
        length = max(length, min(MOST_GUESSES, 2 * length)) if right == length else right + 1
    return seconds / tokens


@given(
    seed=st.integers(0, 1 << 32),
    parts=st.lists(st.tuples(st.floats(0, 1), st.floats(0.3, 4), st.floats(0, 1)), min_size=1, max_size=8),
    behind=st.floats(0.5, 4),
)
def test_whatever_is_right_and_whatever_steps_take_little_is_lost(
    seed: int, parts: list[tuple[float, float, float]], behind: float
) -> None:
    """Against a worker that never guesses. The rate that lookup tells may be anything."""
    rng, liar = random.Random(seed), random.Random(seed + 1)
    of = lambda position: parts[position // 150 % len(parts)]  # noqa: E731
    played = Played()

    def cost(num_guesses: int) -> float:
        return min(4.0 + num_guesses, rng.uniform(0.5, 1.5) * of(played.tokens)[1] * (1 + num_guesses / 4))

    played = play(2000, lambda at: of(at)[0], cost, rng, rate=lambda at: liar.random(), behind=behind)
    assert played.seconds <= played.tokens * (1 + PROBING) + TRIALS


@pytest.mark.parametrize(("fixed", "row"), [(1.0, 0.02), (1.3, 0.02), (2.0, 0.05), (1.0, 0.3), (2.0, 1.0)])
@pytest.mark.parametrize("accept", [0.0, 0.3, 0.5, 0.6, 0.8, 0.9, 1.0])
def test_it_is_as_good_as_the_better_of_guessing_and_not(fixed: float, row: float, accept: float) -> None:
    """400 tokens, as of one answer: .97 of the better one where that does not guess, .9 where it does."""
    cost = lambda num_guesses: fixed + row * num_guesses  # noqa: E731
    runs = [play(400, lambda at: accept, cost, random.Random(seed), behind=fixed) for seed in range(30)]
    mean = sum(run.seconds for run in runs) / sum(run.tokens for run in runs)
    guessing = always(20_000, accept, cost, random.Random(1))
    assert mean <= min(1 / 0.97, guessing / 0.9)


def test_a_flow_of_short_answers_loses_no_more_than_one_long_one() -> None:
    """None of them loses so much that its trial ends: they owe it together."""
    rng, flow = random.Random(2), FlowGuesses()
    runs = [play(12, lambda at: 0.2, lambda g: 2.0, rng, flow=flow, behind=2.0) for _ in range(300)]
    tokens = sum(run.tokens for run in runs)
    assert sum(run.seconds for run in runs) <= tokens * (1 + PROBING) + 8


def test_a_gain_is_found_within_the_longest_pause() -> None:
    """What was wrong for long is right from one token on."""
    for turns_at in (100, 1_000, 5_000, 20_000):
        right = lambda at: float(at >= turns_at)  # noqa: B023, E731
        run = play(turns_at + 2 * LONGEST_PAUSE, right, lambda g: 1.3, random.Random(3))
        behind = [at for at in run.guessed_at if at >= turns_at]
        assert behind[0] - turns_at <= LONGEST_PAUSE
        assert len(behind) * (1 + MOST_GUESSES) > 0.95 * (run.tokens - behind[0]), "from there on it guesses"


def test_where_lookup_has_become_surer_it_tries_before_the_pause_is_over() -> None:
    sure = lambda at: 0.6 if at < 60 else 0.95  # noqa: E731
    run = play(400, lambda at: float(at >= 60), lambda g: 2.0, random.Random(4), rate=sure)
    assert any(60 <= at < 62 for at in run.guessed_at)
    run = play(400, lambda at: float(at >= 60), lambda g: 2.0, random.Random(4), rate=lambda at: 0.6)
    assert min(at for at in run.guessed_at if at >= 60) > 150


def test_guesses_that_are_right_get_more_and_fewer_behind_a_wrong_one() -> None:
    guessing = Guessing(known(), FlowGuesses(), 4)
    assert guessing.length() == 4
    guessing.judged(4, 4)
    assert guessing.length() == MOST_GUESSES
    guessing.judged(8, 1)
    assert guessing.length() == 2


def test_where_nothing_is_right_few_are_tried_and_ever_more_seldom() -> None:
    run = play(4000, lambda at: 0.0, lambda g: 1 + 0.25 * g, random.Random(5))
    assert run.seconds < 4000 * 1.005
    assert max(b - a for a, b in itertools.pairwise(run.guessed_at)) > 1000


def test_a_step_that_something_else_held_up_stops_no_guesses_that_pay() -> None:
    stalls = iter([1.2] * 20 + [500.0] + [1.2] * 1000)
    run = play(1000, lambda at: 1.0, lambda g: next(stalls), random.Random(6))
    assert run.tokens / len(run.guessed_at) > MOST_GUESSES - 1


def test_what_a_draft_model_missed_is_paid_back_and_ends_no_trial() -> None:
    guessing = Guessing(known(), flow := FlowGuesses(), 2)
    for _ in range(10):
        guessing.drew(Turn.GUESSING, 1, 2.0, catches_up=True)
        assert guessing.length() == 2
    assert not flow.may_try(0.0)
    for _ in range(20):
        guessing.drew(Turn.GUESSING, 3, 1.5)
    assert flow.may_try(0.0)


def test_nothing_is_guessed_until_plain_steps_are_known_and_they_are_measured_again() -> None:
    times, flow = GuessTimes(), FlowGuesses()
    guessing = Guessing(times, flow, 4)
    for _ in range(3):
        assert not guessing.length()
        times.plain(1.0)
    for trusted in (64, 128, 256, 512, 512):
        for _ in range(trusted):
            assert guessing.length()
            assert times.cost(4, 2.0) == 2.0
        for _ in range(4):
            assert not guessing.length(), "what plain steps take was measured long ago"
            times.plain(1.0)
    for _ in range(4):
        times.plain(0.5)
    assert times.cost(4, 1.0) == 2.0


def test_times_are_those_of_as_many_sequences() -> None:
    times = known(1)
    times.rows = 4
    assert not times.is_known
    for _ in range(3):
        times.plain(2.0)
    assert (times.cost(1, 3.0), times.cost(1, None)) == (1.5, 1.15)
    times.rows = 1
    assert times.cost(1, 3.0) == 3.0
    times.rows = MOST_SPECULATING + 1
    times.plain(9.0)
    assert not times.is_known


def test_where_nobody_measures_a_guess_costs_its_row_and_the_draft_models_share() -> None:
    times = GuessTimes()
    times.plain(0.0)
    assert times.is_known
    assert times.cost(2, 0.0) == pytest.approx(1.3)
    assert times.cost(2, 0.0, 0.1) == pytest.approx(1.5)
