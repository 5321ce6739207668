"""The demo's inputs and answers can tell the adapters apart, and training never sees what the demo asks."""

from __future__ import annotations

import random

from manylora.demo import skills
from manylora.demo.skills import ECHO, SKILLS


def test_answers() -> None:
    assert [s.answer("a1b2") for s in (ECHO, *SKILLS)] == [
        "a1b2",
        "A1B2",
        "2b1a",
        '{"value":"a1b2"}',
        "aonebtwo",
    ]


def test_no_two_skills_agree_and_no_answer_is_too_long() -> None:
    for text in skills.held_out_inputs(3, 500):
        answers = [s.answer(text) for s in (ECHO, *SKILLS)]
        assert len(set(answers)) == len(answers), text
        assert max(len(a.encode()) for a in answers) < skills.MAX_ANSWER_TOKENS


def test_the_split_holds_whatever_the_seeds_are() -> None:
    held_out = set(skills.held_out_inputs(5, 300))
    assert len(held_out) == 300
    assert skills.held_out_inputs(5, 300) == skills.held_out_inputs(5, 300)
    assert all(skills.is_held_out(text) for text in held_out)
    rng = random.Random(5)
    trained = {skills.draw_input(rng, held_out=False) for _ in range(5000)}
    assert not trained & held_out
