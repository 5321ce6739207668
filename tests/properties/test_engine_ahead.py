"""EngineCore with a runner that takes the next step while one runs: nothing that comes out is another for it."""

from __future__ import annotations

from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling

from tests.properties.engine_suite import (
    EOS,
    Collector,
    FaultyAheadRunner,
    FaultyRunner,
    expected,
    make_engine,
    make_request,
)


def _with_stops(request: EngineRequest) -> EngineRequest:
    return EngineRequest(**{**request.__dict__, "stop_token_ids": frozenset([EOS])})


def _stopping_seed(prompt: int, max_tokens: int) -> int:
    """A seed whose text ends by itself, a few tokens in."""
    for seed in range(1000):
        request = EngineRequest(
            **{**_with_stops(make_request("r", prompt, max_tokens)).__dict__, "sampling": Sampling(seed=seed)}
        )
        if 3 <= len(expected(request, 0)) < max_tokens - 3:
            return seed
    raise AssertionError("no text ends by itself")


def test_the_next_step_is_begun_before_the_last_one_has_ended() -> None:
    core, runner = make_engine(64, make_runner=FaultyAheadRunner)
    core.add(make_request("r", 8, 6), 0.0)
    tokens = []
    for step in range(7):
        tokens.append([t for o in core.step(float(step)) for t in o.token_ids])
        assert core.num_in_flight == (step < 6)
        core.check_invariants()
    assert [len(each) for each in tokens] == [0, 1, 1, 1, 1, 1, 1]
    assert not core.has_work()
    assert core.stats().steps == 6, "no step was for nothing: how many tokens there are was known"
    assert not runner.faults


def test_a_stop_that_is_found_late_costs_its_flow_nothing_and_puts_nothing_out() -> None:
    counted = []
    for make_runner in (FaultyRunner, FaultyAheadRunner):
        core, _ = make_engine(64, make_runner=make_runner)
        seen = Collector()
        sampling = Sampling(seed=_stopping_seed(8, 20))
        request = EngineRequest(**{**_with_stops(make_request("r", 8, 20)).__dict__, "sampling": sampling})
        other = make_request("other", 8, 30)
        for each in (request, other):
            core.add(each, 0.0)
            seen.add(each)
        beside = next(s for s in core._requests.sequences if s.group.request is other)
        while beside.num_output_tokens < 25:
            seen.take(core.step(0.0), core.take_ended())
        assert seen.reasons[RequestId("r"), 0] is FinishReason.STOP
        tag = core._planner.queue.tag_of((TenantId("a"), QosClass.STANDARD))
        while core.has_work():
            seen.take(core.step(0.0), core.take_ended())
        counted.append((core.flows(), tag))
    assert counted[0] == counted[1]


def test_blocks_and_request_stay_until_no_step_in_flight_has_them() -> None:
    core, runner = make_engine(64, make_runner=FaultyAheadRunner)
    core.add(make_request("r", 8, 20), 0.0)
    core.step(0.0)
    core.step(1.0)
    core.abort(RequestId("r"), 2.0)
    (output,) = core.take_outputs()
    assert output.finish_reason is FinishReason.ABORTED
    assert core.take_ended() == []
    assert core.blocks_held_by(TenantId("a")) > 0
    core.check_invariants()
    assert core.step(3.0) == []
    (end,) = core.take_ended()
    assert (end.reason, end.ended_s) == (FinishReason.ABORTED, 2.0)
    assert core.blocks_held_by(TenantId("a")) == 0
    assert not core.has_work()
    assert not runner.faults


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    core, runner = make_engine(64, slots=2, batch_tokens=9, chunk=8, make_runner=FaultyAheadRunner)
    assert isinstance(runner, FaultyAheadRunner)
    core.add(make_request("first", 8, 20), 0.0)
    core.step(0.0)
    core.add(make_request("second", 8, 20), 0.0)
    core.add(make_request("behind", 8, 20), 0.0)
    runner.fail_next_result = True
    outputs = core.step(1.0)
    assert {(o.request_id, o.finish_reason) for o in outputs} == {
        ("first", FinishReason.ERROR),
        ("second", FinishReason.ERROR),
    }
    assert core.stats().failed_steps == 2
    assert core.num_in_flight == 0
    core.check_invariants()
    while core.has_work():
        core.step(2.0)
    assert [end.request_id for end in core.take_ended()] == ["first", "second", "behind"]
    assert core.stats().blocks_free == 64


def test_who_is_next_takes_the_blocks_of_a_sequence_in_flight_as_soon_as_it_is_not() -> None:
    """The order of evictions is that of a runner that computes step by step: nothing slips in between."""
    evicted = []
    for make_runner in (FaultyRunner, FaultyAheadRunner):
        core, _ = make_engine(12, slots=2, make_runner=make_runner)
        for i, tenant in enumerate("aab"):
            core.add(make_request(f"r{i}", 4, 30, tenant=tenant), 0.0)
        steps = 0
        while core.has_work():
            core.step(0.0)
            steps += 1
            assert steps < 400
        evicted.append((core.stats().evictions, core.stats().recomputed_tokens))
    assert evicted[0][0] > 0
    assert evicted[0] == evicted[1]
