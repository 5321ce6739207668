"""Calls without a valid key: how many, and what is kept of it."""

from __future__ import annotations

import pytest
from manylora_router.guard.failures import BURST, MAX_HOSTS, PER_S, Failures
from manylora_shared.errors import Overloaded
from manylora_shared.tenancy.identity import no_key


def test_a_host_has_a_burst_and_a_rate_and_others_have_their_own() -> None:
    failures = Failures()
    for _ in range(int(BURST)):
        failures.note("10.0.0.1", 5.0, no_key())
    with pytest.raises(Overloaded, match=r"without a valid key come from 10\.0\.0\.1"):
        failures.note("10.0.0.1", 5.0, no_key())
    with pytest.raises(Overloaded) as error:
        failures.check("10.0.0.1", 5.0)
    assert error.value.retry_after_s == 1.0
    failures.note("10.0.0.2", 5.0, no_key())
    failures.check("10.0.0.1", 5.0 + 1 / PER_S)
    failures.note("10.0.0.1", 5.0 + 1 / PER_S, no_key())
    with pytest.raises(Overloaded):
        failures.note("10.0.0.1", 5.0 + 1 / PER_S, no_key())


def test_a_network_of_ipv6_is_one_host() -> None:
    failures = Failures()
    for i in range(int(BURST)):
        failures.note(f"2001:db8::{i:x}", 5.0, no_key())
    with pytest.raises(Overloaded):
        failures.check("2001:db8::ffff", 5.0)
    failures.check("2001:db8:0:1::1", 5.0)


def test_what_is_kept_is_bounded_and_the_latest_stays() -> None:
    failures = Failures()
    for i in range(3 * MAX_HOSTS):
        failures.note(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 5.0, no_key())
        for _ in range(2):
            failures.note("192.0.2.1", 5.0, no_key()) if i < BURST / 2 else None
    assert len(failures._counts) == MAX_HOSTS
