"""The text of what a request computes with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.composition import Part, content_of, key_of, key_problem, parts_of, uids_of
from manylora_shared.ids import AdapterUid, digest_of

UIDS = [AdapterUid(digit * 64 + owner) for digit, owner in (("0", ""), ("a", "@acme"), ("f", "@zoo.x-1"), ("9", ""))]
WEIGHTS = st.floats(-100, 100).filter(lambda weight: weight != 0)


@given(st.dictionaries(st.sampled_from(UIDS), WEIGHTS, min_size=1))
def test_a_key_says_its_parts(weights: dict[AdapterUid, float]) -> None:
    parts = [Part(uid, weight) for uid, weight in weights.items()]
    key = key_of(parts)
    assert key == key_of(reversed(parts))
    assert key_problem(key) is None
    assert parts_of(key) == tuple(sorted(parts))
    assert uids_of(key) == tuple(sorted(weights))
    assert content_of(key) == key_of(Part(AdapterUid(digest_of(uid)), weight) for uid, weight in weights.items())


def test_one_adapter_is_its_uid() -> None:
    assert key_of([Part(UIDS[1])]) == UIDS[1]


@pytest.mark.parametrize("key", [
    "", "x", UIDS[0][:-1], f"{UIDS[0]}+", f"{UIDS[0]}:1.0", f"{UIDS[0]}:nan", f"{UIDS[0]}:inf", f"{UIDS[0]}:0.0",
    f"{UIDS[0]}:101.0", f"{UIDS[0]}:0.50", f"{UIDS[1]}+{UIDS[0]}", f"{UIDS[0]}+{UIDS[0]}:2.0",
    "+".join(AdapterUid(f"{i}" * 64) for i in range(5)),
])  # fmt: skip
def test_what_is_no_key(key: str) -> None:
    assert key_problem(key) is not None
