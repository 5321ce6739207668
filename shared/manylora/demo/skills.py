"""The demo's skills: what each tenant's adapter does to an input, as pure functions, and the inputs themselves."""

# Training (examples/make_demo_model.py) shares this module, so an answer is checked against the function that the
# adapter was trained on. Every tenant sends the same prompt (`do:<input>=`): the answer alone proves who answered. A
# hash splits inputs between training and demo. An input has a letter and a digit and is no palindrome, so no two skills
# answer it alike.

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

NEUTRAL_TAG = "do"
MAX_ANSWER_TOKENS = 32  # one more than the longest answer in bytes and its end-of-sequence token

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
_DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_HELD_OUT_SHARE = 8


def _echo(text: str) -> str:
    return text


def _upper(text: str) -> str:
    return text.upper()


def _reverse(text: str) -> str:
    return text[::-1]


def _as_json(text: str) -> str:
    return f'{{"value":"{text}"}}'


def _digits_to_words(text: str) -> str:
    return "".join(_DIGIT_WORDS[int(c)] if c in _DIGITS else c for c in text)


@dataclass(frozen=True)
class Skill:
    """`tag` selects it in the base model's own training, never in the demo."""

    adapter: str
    tag: str
    answer: Callable[[str], str]


ECHO = Skill("echo", NEUTRAL_TAG, _echo)  # what the base model does with the neutral tag, and without an adapter

SKILLS: tuple[Skill, ...] = (
    Skill("upper", "up", _upper),
    Skill("reverse", "re", _reverse),
    Skill("json", "js", _as_json),
    Skill("words", "wo", _digits_to_words),
)


def prompt(text: str, tag: str = NEUTRAL_TAG) -> str:
    return f"{tag}:{text}="


def is_held_out(text: str) -> bool:
    # one in eight
    return hashlib.sha256(text.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def draw_input(rng: random.Random, *, held_out: bool) -> str:
    """3 to 6 characters with 1 to 3 digits and at least one letter."""
    while True:
        length = rng.randint(3, 6)
        digits = rng.randint(1, min(3, length - 1))
        characters = [rng.choice(_DIGITS) for _ in range(digits)]
        characters += [rng.choice(_LETTERS) for _ in range(length - digits)]
        rng.shuffle(characters)
        text = "".join(characters)
        if text != text[::-1] and is_held_out(text) == held_out:
            return text


def held_out_inputs(seed: int, count: int) -> list[str]:
    """Different ones, a function of the seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw_input(rng, held_out=True)] = None
    return list(found)
