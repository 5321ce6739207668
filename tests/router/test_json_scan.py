"""The scanner takes what json takes, and stops where it cannot go on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_router.dialect.json_scan import MAX_DEPTH, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([None, 1]), st.data())
def test_a_value_is_taken_whole(value: object, is_ascii: bool, indent: int | None, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    scanner = JsonScanner()
    cut = data.draw(st.integers(0, len(text)))
    assert scanner.scan(text[:cut]) == cut
    assert scanner.is_done == (cut == len(text))
    assert scanner.scan(text + "}", cut) == len(text)
    assert scanner.is_done


@given(st.text(alphabet='{}[]",:\\u0a1-.e tfnrualse\n', max_size=14))
def test_it_takes_no_more_and_no_less_than_json(text: str) -> None:
    scanner = JsonScanner()
    is_taken = scanner.scan(f"[{text}]") == len(text) + 2 and scanner.is_done
    try:
        json.loads(f"[{text}]")
    except ValueError:
        assert not is_taken
    else:
        assert is_taken


@pytest.mark.parametrize("text", ["[" * (MAX_DEPTH + 1), "[1e999]", "[NaN]", "[" + "1" * 500 + "]"])
def test_what_others_could_not_read_is_refused(text: str) -> None:
    scanner = JsonScanner()
    assert scanner.scan(text) < len(text)
