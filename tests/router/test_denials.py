"""Refused calls are told within a bound, and counted beyond it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_router.guard.denials import (
    ALL_BURST,
    ALL_PER_S,
    BURST,
    COUNT_S,
    MAX_ACCOUNTS,
    MAX_HOSTS,
    PER_S,
    Denials,
)


def test_an_account_is_told_of_a_few_times_and_another_still_is() -> None:
    denials = Denials()
    told = [denials.is_told("tenant acme", "10.0.0.1", 0.0) for _ in range(100)]
    assert told.count(True) == BURST
    assert denials.is_told("tenant birch", "10.0.0.2", 0.0)
    assert denials.counted(COUNT_S - 1) == ""
    assert denials.counted(COUNT_S) == "84 more refused calls in 60 s, of 1 hosts; most of: 10.0.0.1 84"
    assert denials.counted(2 * COUNT_S) == ""
    assert denials.is_told("tenant acme", "10.0.0.1", 1 / PER_S)


def test_strangers_are_counted_by_host_and_most_of_them_named() -> None:
    denials = Denials()
    for host in range(1_000):
        for _ in range(2 if host == 7 else 1):
            denials.count(f"h{host}", 5.0)
    told = denials.counted(6.0, is_last=True)
    assert told.startswith(f"1001 more refused calls in 1 s, of {MAX_ACCOUNTS} hosts; most of: h7 2, h0 1")
    assert told.count(",") == MAX_HOSTS
    assert denials.counted(99.0, is_last=True) == ""


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 600)), max_size=400))
def test_whatever_comes_the_log_grows_by_no_more(calls: list[tuple[float, int]]) -> None:
    denials, now, told, counted = Denials(), 0.0, 0, 0
    for wait_s, account in calls:
        now += wait_s
        told += denials.is_told(f"key {account}", f"h{account}", now)
        assert len(denials._accounts) <= MAX_ACCOUNTS
        assert len(denials._counts) <= MAX_ACCOUNTS
    assert told <= ALL_BURST + ALL_PER_S * now + 1
    left = denials.counted(now, is_last=True)
    counted = int(left.split()[0]) if left else 0
    assert told + counted == len(calls), "each is told or counted"
