"""Limits of a key: exact over a minute, below the tenant's quotas, and forgotten when nothing is lost by it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.gates import key_limits
from manylora_scheduler.gates.key_limits import BUSY_RETRY_NS, KeyBook
from manylora_shared.ids import RequestId, TenantId
from manylora_shared.tenancy.key_limits import MAX_LIMIT, KeyLimits, limit_problems
from manylora_shared.tenancy.quota import to_ns

ACME = TenantId("acme")
LATER = to_ns(1_000.0)  # the term has lasted: buckets are full


def test_requests_a_minute() -> None:
    book, limits = KeyBook(0), KeyLimits("k1", requests_per_min=3)
    for number in range(3):
        assert book.findings(ACME, limits, 10, LATER) == []
        book.begin(ACME, limits, RequestId(f"r{number}"), 10, LATER)
    (found,) = book.findings(ACME, limits, 10, LATER)
    assert (found.quota, found.limit, found.wait_ns) == ("key.requests_per_min", 3, to_ns(20.0))
    assert found.description == "no more than 3 requests a minute of key k1 are admitted"
    assert book.findings(ACME, limits, 10, LATER + to_ns(20.0)) == []
    assert book.findings(ACME, KeyLimits("k2", requests_per_min=3), 10, LATER) == [], "another key"
    assert book.findings(TenantId("b"), limits, 10, LATER) == [], "another tenant's of the same name"


def test_tokens_a_minute_are_taken_whole_and_the_rest_comes_back() -> None:
    book, limits = KeyBook(0), KeyLimits("k1", tokens_per_min=100)
    book.begin(ACME, limits, RequestId("r1"), 80, LATER)
    (found,) = book.findings(ACME, limits, 40, LATER)
    assert found.description == "40 tokens may be used, and key k1 has 20 of 100 a minute left"
    assert found.wait_ns == to_ns(12.0)
    book.end(ACME, limits, RequestId("r1"), 30, LATER)
    assert book.findings(ACME, limits, 70, LATER) == []
    assert book.findings(ACME, limits, 71, LATER) != []
    (never,) = book.findings(ACME, limits, 101, LATER)
    assert never.wait_ns is None
    book.end(ACME, limits, RequestId("r1"), 0, LATER)
    assert book.findings(ACME, limits, 71, LATER) != [], "it ends once"


def test_requests_at_once() -> None:
    book, limits = KeyBook(0), KeyLimits("k1", concurrency=1)
    book.begin(ACME, limits, RequestId("r1"), 10, LATER)
    (found,) = book.findings(ACME, limits, 10, LATER)
    assert (found.quota, found.wait_ns) == ("key.concurrency", BUSY_RETRY_NS)
    book.end(ACME, limits, RequestId("r1"), 10, LATER)
    assert book.findings(ACME, limits, 10, LATER) == []


def test_a_limit_that_changes_and_one_that_goes() -> None:
    book = KeyBook(0)
    book.begin(ACME, KeyLimits("k1", requests_per_min=1), RequestId("r1"), 1, LATER)
    assert book.findings(ACME, KeyLimits("k1", requests_per_min=1), 1, LATER)
    more = KeyLimits("k1", requests_per_min=60)
    assert book.findings(ACME, more, 1, LATER), "what it used stays used"
    assert book.findings(ACME, more, 1, LATER + to_ns(1.0)) == []
    assert book.findings(ACME, KeyLimits("k1", concurrency=2), 1, LATER) == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "MAX_KEYS", 3)
    book = KeyBook(0)
    busy = KeyLimits("busy", concurrency=1)
    book.begin(ACME, busy, RequestId("r1"), 1, LATER)
    for number in range(9):
        book.findings(ACME, KeyLimits(f"k{number}", requests_per_min=5), 1, LATER)
        assert len(book) <= 3
    assert book.findings(ACME, busy, 1, LATER), "who runs something is not forgotten"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 60), st.floats(0, 1)), max_size=120),
)
def test_no_minute_has_more_tokens_than_a_minutes_worth_twice(
    per_min: int, asked: list[tuple[float, int, float]]
) -> None:
    """A bucket that was full and filled meanwhile: never more, whatever comes and ends when."""
    book, limits, now = KeyBook(0), KeyLimits("k1", tokens_per_min=per_min), 1_000.0
    used: list[tuple[float, int]] = []
    for number, (wait_s, tokens, share) in enumerate(asked):
        now += wait_s
        if book.findings(ACME, limits, tokens, to_ns(now)):
            continue
        request_id = RequestId(f"r{number}")
        book.begin(ACME, limits, request_id, tokens, to_ns(now))
        spent = int(tokens * share)
        book.end(ACME, limits, request_id, spent, to_ns(now))
        used.append((now, spent))
        assert sum(n for at, n in used if at > now - 60.0) <= 2 * per_min
        assert sum(n for _, n in used) <= per_min * (1 + (now - 1_000.0) / 60.0) + 1


def test_limits_have_bounds() -> None:
    assert limit_problems(requests_per_min=0, tokens_per_min=MAX_LIMIT, concurrency=1) == []
    assert [v.field for v in limit_problems(requests_per_min=-1, tokens_per_min=MAX_LIMIT + 1)] == [
        "requests_per_min",
        "tokens_per_min",
    ]
