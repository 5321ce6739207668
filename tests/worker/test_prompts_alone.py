"""Which prompts are worth a step without decodes, by the steps so far. In the engine: test_engine_shares.py."""

from __future__ import annotations

import pytest
from manylora_worker.planning.prompts_alone import PromptsAlone

DECODE_S, TOKEN_S = 0.005, 0.0001
ALONE_S = 0.002
"""What a step takes beside its tokens where nothing decodes."""


def busy(
    time: PromptsAlone, *, alone_s: float = ALONE_S, decode_s: float = DECODE_S, steps: int = 200, prompts_in: int = 2
) -> tuple[float, float, int]:
    """Steps with decodes, one in `prompts_in` with a prompt; alone, where it is worth it. Returns what decodes lost to
    prompts alone, how long all took, and how many of these steps followed one another."""
    lost, total, most, in_a_row = 0.0, 0.0, 0, 0
    for step in range(steps):
        count = 16 if step % prompts_in == 0 else 0
        is_alone = count > 0 and time.are_worth_a_step(count)
        if is_alone:
            time.left_out_decodes()
            lost += alone_s
        in_a_row = in_a_row + 1 if is_alone else 0
        most = max(most, in_a_row)
        took = count * TOKEN_S + (alone_s if is_alone else decode_s)
        total += took
        time.measured(count, took, has_decodes=not is_alone)
    return lost, total, most


@pytest.mark.parametrize(
    ("alone_s", "is_worth"),
    [(DECODE_S / 4, True), (DECODE_S / 1.6, True), (DECODE_S / 1.4, False), (DECODE_S, False), (2 * DECODE_S, False)],
)
def test_prompts_are_worth_a_step_where_it_is_shorter_than_decoding_by_half_of_itself(
    alone_s: float, is_worth: bool
) -> None:
    time = PromptsAlone()
    busy(time, alone_s=alone_s, steps=4000, prompts_in=50)
    assert time.are_worth_a_step(16) is is_worth
    lost, _, _ = busy(time, alone_s=alone_s, steps=20000)
    assert is_worth or lost < 20.5 * alone_s, "it is tried once in a thousand steps"


def test_long_prompts_are_worth_no_step_of_their_own() -> None:
    """They would take long in any step."""
    time = PromptsAlone()
    busy(time, steps=4000, prompts_in=50)
    assert time.are_worth_a_step(16)
    assert not time.are_worth_a_step(512)


@pytest.mark.parametrize("prompts_in", [1, 5, 50])
def test_decodes_lose_a_fortieth_of_the_time_at_most_to_prompts_alone(prompts_in: int) -> None:
    time = PromptsAlone()
    busy(time, steps=4000)
    lost, total, in_a_row = busy(time, steps=5000, prompts_in=prompts_in)
    assert lost <= total / 40 + 4 * ALONE_S
    assert in_a_row <= 5
    assert lost >= 0.9 * min(total / 40, 5000 / prompts_in * ALONE_S), "what may be lost is used"


def test_what_decoding_takes_is_known_where_every_step_has_prompts() -> None:
    """The only steps without prompts were of another time, in which decoding took a fifth."""
    time = PromptsAlone()
    busy(time, decode_s=1.2 * ALONE_S, steps=4000, prompts_in=50)
    assert not time.are_worth_a_step(16)
    for _ in range(60):
        time.measured(16, 6 * ALONE_S + 16 * TOKEN_S, has_decodes=True)
    assert time.are_worth_a_step(16)
