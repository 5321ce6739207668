"""A request's place inside its flow, what it needs, and how long its output may be."""

from __future__ import annotations

import pytest
from manylora_scheduler.core.flows import Flows
from manylora_scheduler.core.request import (
    PATIENCE_S,
    OutputEstimate,
    Ticket,
    need_of,
    rank_of,
    urgent_us_of,
)

from tests.scheduler.helpers import request


def ticket_of(order: int = 0, now: float = 10.0, **what: object) -> Ticket:
    wanted = request("r", **what)  # type: ignore[arg-type]
    return Ticket(wanted, Flows().known[wanted.flow], 1, order, 1, now, now)


def test_priority_goes_before_the_deadline_and_that_before_the_order_of_coming() -> None:
    urgent = ticket_of(3, priority=1)
    due_soon = ticket_of(2, deadline=11.0)
    patient = ticket_of(1, deadline=1e9)
    without = ticket_of(4)
    assert sorted([without, patient, due_soon, urgent], key=rank_of) == [urgent, due_soon, patient, without]
    assert rank_of(without).due_us == int(1e6 * (10.0 + PATIENCE_S)) == rank_of(patient).due_us


def test_it_is_urgent_after_half_of_the_time_that_its_caller_gave_it() -> None:
    assert urgent_us_of(ticket_of(deadline=14.0)) == 12_000_000
    assert urgent_us_of(ticket_of()) is None


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(0, 0), (15, 15), (16, 16), (17, 18), (31, 32), (33, 36), (1000, 1024)]
)
def test_needs_are_rounded_up_to_four_significant_bits(tokens: int, rounded: int) -> None:
    assert need_of(request("r", prompt_tokens=tokens)).prompt_tokens == rounded


def test_requests_of_equal_need_are_of_one_router() -> None:
    assert need_of(request("a", prompt_tokens=17)) == need_of(request("b", prompt_tokens=18))
    assert need_of(request("a")) != need_of(request("a", router="other"))


def test_the_estimate_is_all_until_something_has_ended_and_then_the_mean() -> None:
    estimate = OutputEstimate()
    assert estimate.expect(50) == 50
    for tokens in (10, 21):
        estimate.count_tokens(tokens)
        estimate.count_finished()
    assert estimate.expect(50) == 16, "rounded up"
    assert estimate.expect(9) == 9, "no more than it may have"
    assert (OutputEstimate().expect(0), estimate.expect(0)) == (0, 0)


def test_old_requests_fade_and_sixteen_do_not() -> None:
    estimate = OutputEstimate()
    for tokens in [0] * 8 + [100] * 8:
        estimate.count_tokens(tokens)
        estimate.count_finished()
    assert estimate.expect(1000) == 50
    estimate = OutputEstimate()
    for tokens in [400] * 30 + [10] * 100:
        estimate.count_tokens(tokens)
        estimate.count_finished()
    assert 10 <= estimate.expect(1000) <= 12
