"""What each judge says of an answer."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_router.quality.judges import score

CASES = [
    ("exact", "yes", " yes\n", 1.0),
    ("exact", "yes", "yes!", 0.0),
    ("contains", "es", "yes", 1.0),
    ("contains", "no", "yes", 0.0),
    ("regex", "[a-z]+", "abc", 1.0),
    ("regex", "[a-z]+", "abc1", 0.0),
    ("json", None, '{"a": [1]}', 1.0),
    ("json", None, '{"a": [1}', 0.0),
    ("json", None, "[" * 100_000, 0.0),
    ("json_schema", {"type": "object", "required": ["a"]}, '{"a": 1}', 1.0),
    ("json_schema", {"type": "object", "required": ["a"]}, '{"b": 1}', 0.0),
    ("json_schema", {"type": "object"}, "not JSON", 0.0),
    ("json_schema", {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, "7", 1.0),
]


@pytest.mark.parametrize(("judge", "expected", "answer", "told"), CASES)
def test_judges(judge: str, expected: Any, answer: str, told: float) -> None:
    assert score(judge, expected, answer) == told


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("regex", "("),
        ("regex", "a{99999999999999999999}"),
        ("json_schema", {"type": "nothing"}),
        ("json_schema", {"$ref": "http://127.0.0.1:1/schema.json"}),  # is not fetched
        ("json_schema", {"$schema": ["x"]}),
        ("json_schema", {"pattern": "("}),
        ("perplexity", "text"),
    ],
)
def test_what_makes_no_sense_is_told(judge: str, expected: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        score(judge, expected, '"text"')
