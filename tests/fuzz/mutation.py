"""Changes a JSON document as such: random bytes seldom give one that a parser reads far into."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e300, 0.5, float("inf"), float("nan")),
    *("", "x", "\ud800", "\0", "~x", "é" * 9, "x" * 300, "2020-99-99", "²", "a.b", "(", "(a*)*$", "all-linear"),
    *([], {}, [None], [[]], {"": 0}, [1, "a", {}], {"a": {"b": [1]}}, [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]),
)


def mutated(data: bytes, rng: random.Random, words: list[str]) -> bytes | None:
    """None: it is no JSON. `words`: keys and texts seen so far; new ones are noted."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    places = list(_places(document))
    words += [key for _, key in places if isinstance(key, str)][: 500 - len(words)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        document = _changed(document, rng, words)
    return json.dumps(document).encode()


def _changed(document: Any, rng: random.Random, words: list[str]) -> Any:
    odd = copy.deepcopy(rng.choice(ODD))
    places = list(_places(document))
    if not places:
        return odd
    where, key = rng.choice(places)
    other, other_key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del where[key]
        case 1 | 2:
            where[key] = odd
        case 3:
            where[key] = json.loads(json.dumps(other[other_key]))
        case 4 if isinstance(where[key], str):
            where[key] = _changed_text(where[key], rng, words)
        case 4 if isinstance(where[key], int):
            where[key] += rng.choice((-1, 1, 7, 256, 1 << 20))
        case 5 if isinstance(where, dict):
            where[rng.choice([*words, "", "\ud800"])] = rng.choice((odd, odd, odd, where[key]))
        case 5:
            where.insert(key, rng.choice((odd, odd, odd, where[key])))
        case 6:
            where[key] = rng.choice(([where[key]] * rng.choice((1, 2, 40)), {rng.choice(words or [""]): where[key]}))
        case _:
            where[key], other[other_key] = other[other_key], where[key]
    try:
        return json.loads(json.dumps(document))  # nothing stands at two places, or in itself
    except (ValueError, RecursionError):
        return odd


def _changed_text(text: str, rng: random.Random, words: list[str]) -> str:
    at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    piece = rng.choice([*(each for each in ODD if isinstance(each, str)), *words, text[at:end] * 3])
    return (text[:at] + piece + text[rng.choice((at, end)) :])[:2000]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    left = [value]
    while left:
        each = left.pop()
        for key, inner in list(
            each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        ):
            yield each, key
            left.append(inner)
