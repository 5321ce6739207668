"""EngineCore, one step after the other: what becomes of requests, choices, blocks and times."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, FakeStep
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.adapters.loading import LOOK_AGAIN_S
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampled, StepBatch
from manylora_worker.planning.step_planner import PlannerLimits

from tests.properties.engine_rig import BLOCK, A, B, Rig
from tests.properties.engine_suite import (
    CONTEXT,
    Collector,
    FaultyAheadRunner,
    FaultyRunner,
    make_engine,
    make_request,
)


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 20), st.integers(1, 3)), min_size=2, max_size=8),
    num_blocks=st.integers(9, 12),
    make_runner=st.sampled_from([FaultyRunner, FaultyAheadRunner]),
)
def test_a_pool_too_small_for_all_preempts_and_every_text_stays_right(
    shapes: list[tuple[int, int, int]], num_blocks: int, make_runner: type[FaultyRunner | FaultyAheadRunner]
) -> None:
    core, runner = make_engine(num_blocks, make_runner=make_runner)
    seen = Collector()
    for i, (prompt, max_tokens, n) in enumerate(shapes):
        request = make_request(f"r{i}", prompt, max_tokens, n=n, tenant="ab"[i % 2])
        core.add(request, 0.0)
        seen.add(request)
    steps = 0
    while core.has_work():
        steps += 1
        assert steps < 5000
        seen.take(core.step(float(steps)), core.take_ended())
        core.check_invariants()
    assert not runner.faults
    assert core.step_error is None
    assert len(seen.ends) == len(shapes)
    assert set(seen.reasons.values()) <= {FinishReason.LENGTH}


@pytest.mark.parametrize("make_runner", [FaultyRunner, FaultyAheadRunner])
def test_eviction_happens_and_resumes_exactly(make_runner: type[FaultyRunner | FaultyAheadRunner]) -> None:
    core, _ = make_engine(6, make_runner=make_runner)
    seen = Collector()
    for i in range(3):
        request = make_request(f"r{i}", 4, 16, tenant="abc"[i])
        core.add(request, 0.0)
        seen.add(request)
    while core.has_work():
        seen.take(core.step(0.0), core.take_ended())
    stats = core.stats()
    assert stats.evictions > 0
    assert stats.recomputed_tokens > 0
    assert sum(tokens.prompt_tokens for tokens in core.flows().values()) == 3 * 4, "recompute was charged"
    assert len(seen.ends) == 3


def test_a_long_prompt_stalls_no_decode() -> None:
    core, _ = make_engine(64, batch_tokens=9, chunk=4)
    core.add(make_request("short", 1, 20), 0.0)
    core.step(0.0)
    core.add(make_request("long", 32, 4), 0.0)
    for step in range(8):
        outputs = core.step(float(step))
        assert [o.request_id for o in outputs][:1] == ["short"], "the decode missed a step"
    assert {o.request_id for o in core.step(9.0)} == {"short", "long"}


def test_choices_share_the_prompts_blocks_and_count_it_once() -> None:
    core, _ = make_engine(64)
    core.add(make_request("r", 16, 4, n=4), 0.0)
    core.step(0.0)
    core.step(0.0)
    assert core.blocks_held_by(TenantId("a")) == 4
    core.step(0.0)
    # The first three blocks are shared, the fourth is copied thrice, and the leader's 17th token takes one more.
    assert core.blocks_held_by(TenantId("a")) == 3 + 4 + 1
    (flow,) = core.flows().values()
    assert (flow.prompt_tokens, flow.output_tokens) == (16 + 3, 1 + 4)


def test_a_waiting_adapter_holds_back_nobody() -> None:
    runner = FakeRunner(num_blocks=16, block_size=4)
    backend = FakeAdapterBackend(lambda: 0.0, load_s=lambda uid, tier: 1.0)
    core = EngineCore(runner, backend, EngineLimits(PlannerLimits(8, 8, 4), AdapterCacheLimits(8, 8), max_requests=8))
    slow = make_request("slow", 4, 2)
    core.add(EngineRequest(**{**slow.__dict__, "adapter_uid": AdapterUid("u")}), 0.0)
    core.add(make_request("quick", 4, 2), 0.0)
    assert {o.request_id for o in core.step(0.0)} == {"quick"}


def test_what_can_never_fit_is_refused_and_names_the_field() -> None:
    core, _ = make_engine(4)
    core.add(make_request("fits", 8, 9), 0.0)
    for request, field in (
        (make_request("r", 8, 10), "max_tokens"),
        (make_request("r", CONTEXT, 1), "prompt_token_ids"),
        (make_request("r", 1, 1, n=9), "n"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            core.add(request, 0.0)
        assert refusal.value.violations[0].field == field
    while core.has_work():
        core.step(0.0)
    (end,) = core.take_ended()
    assert end.reason is FinishReason.STOP


def test_a_full_context_ends_a_choice() -> None:
    core, runner = make_engine(32)
    core.add(make_request("r", CONTEXT - 3, 20), 0.0)
    outputs = [o for _ in range(9) for o in core.step(0.0)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert not runner.faults
    assert core.step_error is None


@pytest.mark.parametrize(
    ("uid", "reason"), [(None, FinishReason.ERROR), (AdapterUid("a" * 64), FinishReason.ADAPTER_FAILED)]
)
def test_logits_that_are_not_finite_are_the_adapters_fault_where_there_is_one(
    uid: AdapterUid | None, reason: FinishReason
) -> None:
    core, runner = make_engine(16)
    core.add(replace(make_request("broken", 8, 4), adapter_uid=uid), 0.0)
    runner.corrupt_next = True
    for now in range(9):
        core.step(float(now))
        core.check_invariants()
    (end,) = core.take_ended()
    assert (end.reason, "not finite" in end.message) == (reason, True)
    assert core.step_error is None


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    core, runner = make_engine(16, batch_tokens=8, chunk=8, slots=1)
    core.add(make_request("in the step", 8, 4), 0.0)
    core.add(make_request("behind it", 8, 4), 0.0)
    runner.fail_next = True
    (output,) = core.step(0.0)
    assert (output.request_id, output.finish_reason) == ("in the step", FinishReason.ERROR)
    assert output.message == "the step failed: RuntimeError: the device is gone"
    assert isinstance(core.step_error, RuntimeError)
    core.check_invariants()
    outputs = [o for _ in range(4) for o in core.step(0.0)]
    assert len(outputs) == 4
    assert core.step_error is None


def test_times_of_the_phases() -> None:
    runner = FakeRunner(num_blocks=16, block_size=4)
    now = 0.0
    backend = FakeAdapterBackend(lambda: now, load_s=lambda uid, tier: 2.0)
    limits = EngineLimits(PlannerLimits(8, 2, 4), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(runner, backend, limits)
    core.add(EngineRequest(**{**make_request("r", 4, 3).__dict__, "adapter_uid": AdapterUid("u")}), now)
    ends: list[RequestEnd] = []
    while not ends:
        core.step(now)
        ends = core.take_ended()
        now += 1.0
    assert (ends[0].adapter_wait_s, ends[0].prefill_s, ends[0].decode_s) == (4.0, 1.0, 2.0)


def test_how_soon_the_engine_looks_again_where_no_step_can_begin() -> None:
    now = 0.0
    backend = FakeAdapterBackend(lambda: now, load_s=lambda uid, tier: 2.0)
    limits = EngineLimits(PlannerLimits(8, 2, 4), AdapterCacheLimits(8, 8), max_requests=8)
    core = EngineCore(FakeRunner(num_blocks=16, block_size=4), backend, limits)
    assert core.rest_s() is None
    core.add(EngineRequest(**{**make_request("r", 4, 3).__dict__, "adapter_uid": AdapterUid("u")}), now)
    assert core.begin_step(now) is None
    soon = core.rest_s()
    assert soon is not None
    assert soon < LOOK_AGAIN_S, "a load was begun: that may let the adapter cache do more"
    now += soon
    assert core.begin_step(now) is None
    assert core.rest_s() == LOOK_AGAIN_S, "it did nothing more, and the load's end is news"
    now = 2.0
    assert core.begin_step(now) is None
    assert core.rest_s() == soon, "the load to the device was begun"
    core.pause(RequestId("r"))
    assert core.begin_step(now) is None
    assert core.rest_s() == LOOK_AGAIN_S, "the load goes on"
    now = 4.0
    assert core.begin_step(now) is None
    assert core.rest_s() is None, "resuming is news too"
    core.resume(RequestId("r"))
    assert core.begin_step(now) is not None


@pytest.mark.parametrize(("slots", "num_blocks"), [(8, 100), (16, 400)])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 0.99])
def test_a_long_prompt_begins_beside_a_flood_of_short_ones(slots: int, num_blocks: int, part: float) -> None:
    """Quanta end one by one: what each leaves free would be the flood's again."""
    rng = random.Random(slots)
    rig = Rig.make(num_blocks, slots, batch_tokens=256)

    def flood() -> None:
        here = [request_id for request_id in rig.requests if request_id not in rig.ended]
        for _ in range(slots + slots // 2 - sum(request_id.startswith(A) for request_id in here)):
            rig.add(A, rng.randint(10, 40), rng.randint(10, 60))

    for _ in range(60):
        flood()
        rig.step()
    long = rig.add(B, int(part * num_blocks) * BLOCK - 4, 4)
    waited = 0
    while not rig.is_admitted(long) and waited < 100:
        flood()
        rig.step()
        waited += 1
    assert waited < 100, "it is a few quanta"


class Trials(FaultyRunner):
    """A step with the adapter `bad` fails."""

    batches: list[list[object]]

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        self.batches = [*getattr(self, "batches", []), [chunk.adapter_uid for chunk in batch.chunks]]
        if any(chunk.adapter_uid == "bad" for chunk in batch.chunks):
            raise ZeroDivisionError
        return super().execute(batch)


class TrialsAhead(FaultyAheadRunner):
    batches: list[list[object]]

    def submit(self, batch: StepBatch) -> FakeStep:
        self.batches = [*getattr(self, "batches", []), [chunk.adapter_uid for chunk in batch.chunks]]
        if self.batches.count(["bad"]) % 2 and self.batches[-1] == ["bad"]:
            raise ZeroDivisionError
        return super().submit(batch)

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if any(chunk.adapter_uid == "bad" for chunk in batch.chunks):
            raise ZeroDivisionError
        return super().execute(batch)


@pytest.mark.parametrize("make_runner", [Trials, TrialsAhead])
def test_a_trials_step_is_its_own_and_its_error_nobody_elses(make_runner: type[Trials | TrialsAhead]) -> None:
    core, runner = make_engine(200, batch_tokens=32, slots=6, make_runner=make_runner)
    collector = Collector()

    def add(request: EngineRequest) -> None:
        collector.add(request)
        core.add(request, 0.0)

    def step() -> None:
        collector.take(list(core.step(0.0)), list(core.take_ended()))
        core.check_invariants()
        assert core.step_error is None or core.is_trial_error

    for i in range(9):
        add(make_request(f"r{i}", 5 + i, 30, tenant=f"t{i % 3}"))
    names = [f"trial{i}" for i in range(6)]
    for i, name in enumerate(names):
        for _ in range(3):
            step()
        uid = AdapterUid("bad" if i < 4 else "good")
        add(replace(make_request(name, 3, 1, tenant="late"), adapter_uid=uid, is_trial=True))
    while core.has_work() or core.num_in_flight:
        step()
    reasons = {end.request_id: end.reason for end in collector.ends.values()}
    assert [reasons[RequestId(name)] for name in names[:4]] == [FinishReason.ERROR] * 4
    others = {reason for name, reason in reasons.items() if name not in names[:4]}
    assert others <= {FinishReason.STOP, FinishReason.LENGTH}, "whose texts the collector has checked"
    mixed = [batch for batch in runner.batches if {"bad", "good"} & set(batch) and len(batch) > 1]
    assert not mixed, "tried beside others"
