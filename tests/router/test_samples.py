"""The last hour in steps, bounded in time and in tenants."""

from __future__ import annotations

from manylora_router.history.samples import IDLE, MAX_COUNTED, MAX_TENANTS, NUM_STEPS, Samples, Standing


def test_a_step_counts_what_came_in_it() -> None:
    samples = Samples()
    samples.begin(100.0)
    for _ in range(4):
        samples.first_token("acme", prompt_tokens=10, ttft_ms=100.0, queue_ms=20.0)
        samples.tokens_came("acme", 7)
        samples.ended("acme", is_rejected=False, is_failed=False)
    samples.ended("other", is_rejected=True, is_failed=False)
    samples.close_step({"acme": Standing(2, 1)}, 110.0)
    samples.close_step({}, 120.0)
    first, second = samples.rows("acme")
    assert first is not None
    assert (first.requests, first.failed, first.rejected) == (4, 0, 0)
    assert (first.prompt_tokens, first.completion_tokens, first.waiting, first.running) == (40, 28, 2, 1)
    assert first.ttft_p50_ms is not None
    assert 100.0 <= first.ttft_p50_ms <= 110.0
    assert first.queue_p95_ms is not None
    assert 20.0 <= first.queue_p95_ms <= 22.0
    assert second == IDLE
    total = samples.rows("")[0]
    assert total is not None
    assert (total.requests, total.rejected, total.running) == (5, 1, 1)
    assert (samples.began_at, samples.closed_at) == (100.0, 120.0)


def test_an_hour_is_kept() -> None:
    samples = Samples()
    for number in range(NUM_STEPS + 50):
        samples.tokens_came("acme", number)
        samples.close_step({}, float(number))
    assert len(samples.steps) == NUM_STEPS
    assert samples.steps[0].number == 50
    assert samples.steps[0].total.completion_tokens == 50


def test_the_most_used_are_those_of_the_hour_alone() -> None:
    samples = Samples()
    samples.tokens_came("past", 1 << 40)
    samples.close_step({}, 0.0)
    for number in range(NUM_STEPS):
        samples.tokens_came("acme", number + 1)
        samples.tokens_came("other", 1)
        samples.close_step({}, float(number))
    assert samples.most_used(5) == ["acme", "other"]
    assert samples._used["acme"] == sum(row.completion_tokens for row in samples.rows("acme") if row is not None)


def test_of_many_tenants_the_busiest_are_named_and_all_are_in_the_total() -> None:
    samples = Samples()
    for number in range(MAX_COUNTED + 100):
        samples.tokens_came(f"tenant-{number}", number + 1)
    samples.close_step({}, 10.0)
    (step,) = samples.steps
    assert len(step.tenants) == MAX_TENANTS
    assert step.of(f"tenant-{MAX_COUNTED - 1}") is not None
    assert step.of("tenant-3") is None, "nobody knows whether it was idle"
    many = MAX_COUNTED + 100
    assert step.total.completion_tokens == many * (many + 1) // 2
    assert samples.most_used(2) == [f"tenant-{MAX_COUNTED - 1}", f"tenant-{MAX_COUNTED - 2}"]
