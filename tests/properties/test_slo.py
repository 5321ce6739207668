"""The trackers of service levels against plain lists: windows, quantiles, targets and budgets."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.errors import (
    AdapterFailed,
    Cancelled,
    CircuitOpen,
    Code,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Quarantined,
    QuotaBreach,
    QuotaExceeded,
    QuotaExhausted,
    RpcError,
    ServiceUnavailable,
    SlowReader,
    Unready,
    WorkerLost,
)
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import MAX_TTFT_MS, Slo
from manylora_shared.tenancy.slo import (
    AVAILABILITY_WINDOW_S,
    LATENCY_WINDOW_S,
    NUM_BUCKETS,
    NUM_SLICES,
    RATIO,
    FlowCounts,
    SlidingCounts,
    SloTracker,
    Verdict,
    bucket_of,
    quantile_ms,
    upper_ms,
    verdict_of,
)

FLOW = (TenantId("acme"), QosClass.INTERACTIVE)
DURATIONS = st.floats(0.0, float(MAX_TTFT_MS))


@given(DURATIONS)
def test_a_bucket_holds_what_is_up_to_its_bound_and_above_the_one_below(duration_ms: float) -> None:
    bucket = bucket_of(duration_ms)
    assert 0 <= bucket < NUM_BUCKETS
    assert duration_ms <= upper_ms(bucket)
    assert bucket == 0 or duration_ms > upper_ms(bucket - 1)


def test_bounds_are_in_their_own_buckets_and_what_is_longer_in_the_last() -> None:
    assert [bucket_of(upper_ms(bucket)) for bucket in range(NUM_BUCKETS)] == list(range(NUM_BUCKETS))
    assert bucket_of(1e12) == NUM_BUCKETS - 1
    assert upper_ms(NUM_BUCKETS - 1) >= MAX_TTFT_MS > upper_ms(NUM_BUCKETS - 2)


@given(st.lists(st.floats(0.1, float(MAX_TTFT_MS)), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_never_below_the_true_one_nor_more_than_a_bucket_above(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    true_ms = sorted(values)[math.ceil(share * len(values)) - 1]
    read_ms = quantile_ms(counts, share)
    assert read_ms is not None
    assert true_ms <= read_ms <= true_ms * RATIO * (1 + 1e-9)


def test_the_quantile_of_nothing_is_none() -> None:
    assert quantile_ms({}, 0.95) is None


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([6.0, 300.0, 3600.0]))
def test_a_window_holds_what_is_young_and_forgets_what_is_old(seed: int, window_s: float) -> None:
    rng = random.Random(seed)
    counts, added = SlidingCounts(window_s), list[tuple[float, int]]()
    now = rng.uniform(0, 1e6)
    for _ in range(150):
        now += rng.choice([0.0, rng.uniform(0, window_s / 50), rng.uniform(0, window_s), 3 * window_s * rng.random()])
        if rng.random() < 0.8:
            key = rng.randrange(4)
            counts.add(key, now)
            added.append((now, key))
        totals = counts.totals(now)
        assert all(count > 0 for count in totals.values())
        for key in range(4):
            ages = [now - at for at, k in added if k == key]
            surely = sum(age < window_s * (1 - 1 / NUM_SLICES) - 1e-6 for age in ages)
            at_most = sum(age <= window_s + 1e-6 for age in ages)
            assert surely <= totals.get(key, 0) <= at_most


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 2000), st.booleans()), max_size=150), st.integers(1, 2000))
def test_targets_and_budgets_are_exact(requests: list[tuple[float, bool]], target_ms: int) -> None:
    tracker, slo = SloTracker(), Slo(ttft_p95_ms=target_ms, availability=0.9)
    for ttft_ms, is_good in requests:
        tracker.ended(FLOW, Verdict.GOOD if is_good else Verdict.BAD, 50.0, ttft_ms=ttft_ms, slo=slo)
    counts = tracker.counts(50.0).get(FLOW, FlowCounts())
    num_bad = sum(not is_good for _, is_good in requests)
    assert (counts.num_counted, counts.bad, counts.num_measured) == (len(requests), num_bad, len(requests))
    if not requests:
        assert (counts.is_ttft_met, counts.availability, counts.error_budget(0.9)) == (None, 1.0, 1.0)
        return
    ordered = sorted(ttft_ms for ttft_ms, _ in requests)
    assert counts.is_ttft_met == (ordered[math.ceil(0.95 * len(ordered)) - 1] <= target_ms)
    assert counts.availability == pytest.approx(1 - num_bad / len(requests))
    permitted = 0.1 * len(requests)
    assert counts.error_budget(0.9) == pytest.approx((permitted - num_bad) / permitted)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(1, 1e4), st.booleans()), max_size=80))
def test_routers_counts_add_up_to_those_of_one(requests: list[tuple[int, float, bool]]) -> None:
    one, several = SloTracker(), [SloTracker() for _ in range(4)]
    for router, ttft_ms, is_good in requests:
        for tracker in (one, several[router]):
            verdict = Verdict.GOOD if is_good else Verdict.BAD
            tracker.ended(FLOW, verdict, 7.0, ttft_ms=ttft_ms, tpot_ms=ttft_ms / 10, slo=Slo(ttft_p95_ms=500))
    total = FlowCounts()
    for tracker in several:
        total += tracker.counts(7.0).get(FLOW, FlowCounts())
    assert total == one.counts(7.0).get(FLOW, FlowCounts())


def test_windows_pass_and_flows_are_bounded() -> None:
    tracker = SloTracker(max_flows=3)
    for index in range(5):
        flow = (TenantId(f"t{index}"), QosClass.BATCH)
        tracker.ended(flow, Verdict.BAD, float(index), ttft_ms=3.0)
        if index == 2:
            tracker.ended((TenantId("t0"), QosClass.BATCH), Verdict.GOOD, 2.5)
    assert {flow[0] for flow in tracker.counts(10.0)} == {"t0", "t3", "t4"}, "the longest idle went first"
    assert {flow[0] for flow in tracker.counts(10.0, tenant_id="t3")} == {"t3"}
    later = tracker.counts(LATENCY_WINDOW_S + 10)[TenantId("t4"), QosClass.BATCH]
    assert (later.num_measured, later.bad) == (0, 1)
    assert tracker.counts(AVAILABILITY_WINDOW_S + 10) == {}


def test_an_excused_request_without_a_token_leaves_no_trace() -> None:
    tracker = SloTracker()
    tracker.ended(FLOW, Verdict.EXCUSED, 1.0)
    assert len(tracker) == 0
    tracker.ended(FLOW, Verdict.EXCUSED, 1.0, ttft_ms=5.0)
    counts = tracker.counts(1.0)[FLOW]
    assert (counts.num_counted, counts.num_measured) == (0, 1)


BREACH = QuotaBreach("quotas.concurrency", "acme", 1, "full")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, Verdict.GOOD),
        (InvalidRequest("x"), Verdict.EXCUSED),
        (NotFound("x"), Verdict.EXCUSED),
        (Unready("x"), Verdict.EXCUSED),
        (Cancelled("x"), Verdict.EXCUSED),
        (SlowReader("x"), Verdict.EXCUSED),
        (QuotaExceeded("x", breaches=[BREACH]), Verdict.EXCUSED),
        (QuotaExhausted("x"), Verdict.EXCUSED),
        (RpcError(Code.FAILED_PRECONDITION, "too large for every worker"), Verdict.EXCUSED),
        (RpcError(Code.RESOURCE_EXHAUSTED, "the cluster's queue is full"), Verdict.BAD),
        (RpcError(Code.UNAVAILABLE, "no worker is serving"), Verdict.BAD),
        (Overloaded("x"), Verdict.BAD),
        (ServiceUnavailable("x"), Verdict.BAD),
        (WorkerLost("x"), Verdict.BAD),
        (AdapterFailed("x"), Verdict.BAD),
        (InternalError("x"), Verdict.BAD),
        (CircuitOpen("x"), Verdict.BAD),
        (Quarantined("x"), Verdict.BAD),
        (ValueError("x"), Verdict.BAD),
    ],
)
def test_only_what_is_the_services_doing_counts(error: Exception | None, verdict: Verdict) -> None:
    assert verdict_of(error, given_ms=5.0, has_answered=False, slo=None) is verdict


@pytest.mark.parametrize("error", [DeadlineExceeded("x"), RpcError(Code.DEADLINE_EXCEEDED, "while queued")])
@pytest.mark.parametrize(
    ("given_ms", "has_answered", "target_ms", "verdict"),
    [
        (299.0, False, 300, Verdict.EXCUSED),
        (300.0, False, 300, Verdict.BAD),
        (300.0, True, 300, Verdict.EXCUSED),
        (9_999.0, False, None, Verdict.EXCUSED),
        (10_000.0, False, None, Verdict.BAD),
    ],
)
def test_a_deadline_counts_where_the_caller_was_patient(
    error: Exception, given_ms: float, has_answered: bool, target_ms: int | None, verdict: Verdict
) -> None:
    slo = Slo(ttft_p95_ms=target_ms) if target_ms is not None else None
    assert verdict_of(error, given_ms=given_ms, has_answered=has_answered, slo=slo) is verdict
