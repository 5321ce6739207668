"""EngineCore over FakeRunner: whatever comes and goes, every output is the reference's, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_shared.errors import InvalidRequest, QuotaExceeded
from manylora_shared.ids import AdapterName, AdapterUid, QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.adapters.loading import LOOK_AGAIN_S
from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.api import (
    AdapterTier,
    EngineRequest,
    FinishReason,
    Sampled,
    Sampling,
    StepBatch,
    TokenOutput,
)
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.fake_runner import (
    AheadFakeRunner,
    FakeAdapterBackend,
    FakeRunner,
    FakeStep,
    reference_tokens,
)
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.engine.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.engine.step_planner import PlannerLimits
from manylora_worker.engine.tenant_shares import TenantShare

_EOS = 0
_EOS_ONE_IN = 12
_CONTEXT = 40
_STEMS = (tuple(range(1, 21)), (1, 2, 3, 4, 5, 6, *range(50, 64)), (7,) * 20)
"""Prompts begin with a part of one of these, so that they share prefixes."""
_PROMPTS = st.builds(
    lambda stem, shared, tail: [*stem[:shared], *tail],
    st.sampled_from(_STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 258), min_size=1, max_size=8),
)
_SIZES = {AdapterUid(f"uid{i}"): size for i, size in enumerate([1, 2, 3, 4])}


class FaultyRunner(FakeRunner):
    """Fails the step that it is told to, before it has touched anything."""

    fail_next = False
    corrupt_next = False

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        sampled = super().execute(batch)
        if self.corrupt_next and sampled:
            self.corrupt_next = False
            return [Sampled(sampled[0].sequence_id, 0, error="the logits are not finite"), *sampled[1:]]
        return sampled


class FaultyAheadRunner(AheadFakeRunner):
    """As FaultyRunner; the failure may show only when the result is read, and another step is in flight by then."""

    fail_next = False
    fail_next_result = False
    corrupt_next = False

    def submit(self, batch: StepBatch) -> FakeStep:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        return super().submit(batch)

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if self.fail_next_result:
            self.fail_next_result = False
            raise RuntimeError("the device is gone")
        sampled = super().execute(batch)
        if self.corrupt_next and sampled:
            self.corrupt_next = False
            return [Sampled(sampled[0].sequence_id, 0, error="the logits are not finite"), *sampled[1:]]
        return sampled


def expected(request: EngineRequest, choice: int) -> list[int]:
    """The request's whole output, by the reference, under the fake's end-of-sequence."""
    count = min(request.max_tokens, _CONTEXT - len(request.prompt_token_ids))
    return reference_tokens(
        request.prompt_token_ids,
        request.adapter_uid,
        request.sampling.seed,
        choice,
        count,
        greedy=request.sampling.is_greedy,
        eos_token_id=_EOS,
        eos_one_in=_EOS_ONE_IN,
        emitted_token_ids=request.emitted_token_ids,
        stop_token_ids=request.stop_token_ids,
    )


class Collector:
    """What came out of the engine, by request and choice, with the contract of TokenOutput checked."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, EngineRequest] = {}
        self.tokens: dict[tuple[RequestId, int], list[int]] = {}
        self.reasons: dict[tuple[RequestId, int], FinishReason] = {}
        self.ends: dict[RequestId, RequestEnd] = {}

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        for choice in range(request.n):
            self.tokens[request.request_id, choice] = list(request.emitted_token_ids)

    def take(self, outputs: list[TokenOutput], ends: list[RequestEnd]) -> None:
        for output in outputs:
            key = (output.request_id, output.choice)
            assert key not in self.reasons, "output after the end"
            assert output.request_id not in self.ends
            assert output.first_position == len(self.tokens[key]), "positions have a gap"
            self.tokens[key] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                self._check_end(output)
        for end in ends:
            assert end.request_id not in self.ends, "a request ended twice"
            self.ends[end.request_id] = end
            for choice in range(self.requests[end.request_id].n):
                assert (end.request_id, choice) in self.reasons
            assert min(end.adapter_wait_s, end.prefill_s, end.decode_s) >= 0

    def _check_end(self, output: TokenOutput) -> None:
        request = self.requests[output.request_id]
        want = expected(request, output.choice)
        got = self.tokens[output.request_id, output.choice]
        match output.finish_reason:
            case FinishReason.LENGTH:
                assert got == want
                assert len(got) in (request.max_tokens, _CONTEXT - len(request.prompt_token_ids))
            case FinishReason.STOP if output.stop_token_id is not None:
                assert output.stop_token_id in request.stop_token_ids
                assert got == want
            case _:
                assert got == want[: len(got)]


class EngineMachine(RuleBasedStateMachine):
    make_runner: type[FaultyRunner | FaultyAheadRunner] = FaultyRunner

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        slots=st.integers(1, 6),
        batch_tokens=st.integers(0, 12),
        chunk=st.integers(1, 9),
        device=st.integers(3, 8),
        load_s=st.integers(0, 3),
        cache_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        clears_freed=st.booleans(),
        num_host_blocks=st.sampled_from([0, 16, 80]),
        copy_polls=st.integers(0, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        slots: int,
        batch_tokens: int,
        chunk: int,
        device: int,
        load_s: int,
        cache_share: float,
        clears_freed: bool,
        num_host_blocks: int,
        copy_polls: int,
    ) -> None:
        self.now = 0.0
        self.broken: dict[AdapterUid, None] = {}
        self.backend = FakeAdapterBackend(
            lambda: self.now,
            size_bytes=lambda uid: _SIZES[uid],
            load_s=lambda uid, tier: load_s,
            error_of=lambda uid, tier: "broken" if uid in self.broken and tier is AdapterTier.HOST else None,
        )
        self.runner = self.make_runner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_context_tokens=_CONTEXT,
            eos_token_id=_EOS,
            eos_one_in=_EOS_ONE_IN,
            adapters_on_device=lambda: self.backend.on_device,
            num_host_blocks=num_host_blocks,
            copy_polls=copy_polls,
        )
        limits = EngineLimits(
            PlannerLimits(slots + batch_tokens, chunk, slots),
            AdapterCacheLimits(host_bytes=8, device_bytes=device, host_loads=2, device_loads=1, max_overtakes=2),
            max_requests=64,
        )
        prefix = PrefixOptions(PrefixKeys(bytes(32), "model"), cache_share) if cache_share else None
        self.core = EngineCore(self.runner, self.backend, limits, prefix, clears_freed=clears_freed)
        self.runner.tenant_of = self.core.tenant_of
        self.seen = Collector()
        self.serial = 0
        self.failed_steps = 0

    def _take(self) -> None:
        self.seen.take(self.core.take_outputs(), self.core.take_ended())

    def _live(self) -> list[RequestId]:
        return [r for r in self.seen.requests if r not in self.seen.ends]

    @rule(
        tenant=st.sampled_from(["a", "b", "c"]),
        adapter=st.sampled_from([None, *sorted(_SIZES)]),
        prompt=_PROMPTS,
        max_tokens=st.integers(1, 24),
        n=st.integers(1, 4),
        num_emitted=st.integers(0, 6),
        greedy=st.booleans(),
        has_stop=st.booleans(),
    )
    def add(
        self,
        tenant: str,
        adapter: AdapterUid | None,
        prompt: list[int],
        max_tokens: int,
        n: int,
        num_emitted: int,
        greedy: bool,
        has_stop: bool,
    ) -> None:
        self.serial += 1
        request = EngineRequest(
            request_id=RequestId(f"r{self.serial}"),
            tenant_id=TenantId(tenant),
            qos_class=QosClass.STANDARD,
            adapter_uid=adapter,
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(seed=self.serial, temperature=0.0 if greedy else 1.0),
            stop_token_ids=frozenset([_EOS]) if has_stop else frozenset(),
            n=n,
        )
        if n == 1 and num_emitted:
            emitted = tuple(expected(request, 0)[: min(num_emitted, max_tokens - 1)])
            request = EngineRequest(**{**request.__dict__, "emitted_token_ids": emitted})
        try:
            self.core.check(request)
            self.core.add(request, self.now)
        except (InvalidRequest, QuotaExceeded):
            return
        self.seen.add(request)
        self._take()

    @rule(data=st.data())
    @precondition(lambda self: self._live())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort(data.draw(st.sampled_from(self._live())), self.now)
        self._take()

    @rule(data=st.data(), choice=st.integers(0, 3))
    @precondition(lambda self: self._live())
    def stop_choice(self, data: st.DataObject, choice: int) -> None:
        self.core.stop_choice(data.draw(st.sampled_from(self._live())), choice, self.now)
        self._take()

    @rule(data=st.data(), is_paused=st.booleans())
    @precondition(lambda self: self._live())
    def set_paused(self, data: st.DataObject, is_paused: bool) -> None:
        request_id = data.draw(st.sampled_from(self._live()))
        (self.core.pause if is_paused else self.core.resume)(request_id)

    @rule(
        tenant=st.sampled_from(["a", "b", "c"]),
        weight=st.integers(1, 5),
        bounds=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
        is_soft=st.booleans(),
        is_hard=st.booleans(),
    )
    def set_share(
        self, tenant: str, weight: int, bounds: tuple[int, int, int] | None, is_soft: bool, is_hard: bool
    ) -> None:
        share = None
        if bounds is not None:
            reserve, soft, hard = bounds
            share = TenantShare(
                dict.fromkeys(QosClass, weight),
                soft_blocks=reserve + soft if is_soft else None,
                hard_blocks=reserve + soft + hard if is_hard else None,
                reserve_blocks=reserve,
            )
        self.core.set_share(TenantId(tenant), share)

    @rule(uid=st.sampled_from(sorted(_SIZES)), tenant=st.sampled_from([None, "a", "b"]))
    def prefetch(self, uid: AdapterUid, tenant: str | None) -> None:
        self.core.prefetch(uid, None if tenant is None else TenantId(tenant))

    @rule(tenant=st.sampled_from(["a", "b"]), uid=st.none() | st.sampled_from(sorted(_SIZES)))
    def pin(self, tenant: str, uid: AdapterUid | None) -> None:
        pins = [] if uid is None else [Pin(AdapterName(uid), uid, _SIZES[uid])]
        self.core.set_pins({TenantId(tenant): pins}, max(_SIZES.values()))

    @rule(uid=st.sampled_from(sorted(_SIZES)))
    def toggle_broken(self, uid: AdapterUid) -> None:
        if self.broken.pop(uid, self) is self:
            self.broken[uid] = None

    @rule()
    def fail_a_step(self) -> None:
        self.runner.fail_next = True

    @rule()
    @precondition(lambda self: isinstance(self.runner, FaultyAheadRunner))
    def fail_a_result(self) -> None:
        assert isinstance(self.runner, FaultyAheadRunner)
        self.runner.fail_next_result = True

    @rule()
    def corrupt_a_token(self) -> None:
        self.runner.corrupt_next = True

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> bool:
        """Whether anything was computed."""
        self.now += 1
        before = (self.core.stats().steps, self.core.num_in_flight)
        outputs = self.core.step(self.now)
        assert not self.runner.faults, self.runner.faults
        if self.core.stats().failed_steps > self.failed_steps:
            self.failed_steps = self.core.stats().failed_steps
            assert str(self.core.step_error) == "the device is gone"
        self.seen.take(outputs, self.core.take_ended())
        self.core.check_invariants()
        return (self.core.stats().steps, self.core.num_in_flight) != before

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "core"):
            self.core.check_invariants()
            assert self.core.stats().requests == len(self._live())
            most = self.core.stats().host_blocks_total // 2
            assert max(self.core.host_blocks_held().values(), default=0) <= most, "one tenant has all of the host"

    def teardown(self) -> None:
        """Without further disturbance all ends, in a bounded number of steps: no livelock. And nothing is left."""
        if not hasattr(self, "core"):
            return
        self.runner.fail_next = self.runner.corrupt_next = False
        if isinstance(self.runner, FaultyAheadRunner):
            self.runner.fail_next_result = False
        for request_id in self._live():
            self.core.resume(request_id)
        bound = 200 + 60 * sum(r.n * (len(r.prompt_token_ids) + r.max_tokens) for r in self.seen.requests.values())
        idle = 0
        for _ in range(bound):
            if not self.core.has_work():
                break
            idle = 0 if self.one_step() else idle + 1
            assert idle < 40, "requests are there, and nothing moves"
        assert not self.core.has_work(), "some request does not end"
        assert self._live() == []
        stats = self.core.stats()
        assert (stats.requests, stats.sequences, stats.running_sequences) == (0, 0, 0)
        assert stats.blocks_free == stats.blocks_total
        assert stats.host_blocks_free == stats.host_blocks_total
        assert stats.swaps_in <= stats.swaps_out
        self.core.check_invariants()


TestEngineCore = EngineMachine.TestCase
TestEngineCore.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


class AheadEngineMachine(EngineMachine):
    make_runner = FaultyAheadRunner


TestAheadEngineCore = AheadEngineMachine.TestCase
TestAheadEngineCore.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


def test_who_waits_for_copies_is_not_robbed_by_what_is_found_in_the_cache() -> None:
    """Found by the machine: a waits for a choice of b to be copied out, and its sibling shared those blocks as soon as
    they were cached, until it was copied out for a in its turn: for ever."""
    machine = AheadEngineMachine()
    machine.start(14, 2, slots=4, batch_tokens=0, chunk=1, device=3, load_s=0, cache_share=0.1, clears_freed=False,
                  num_host_blocks=40, copy_polls=0)  # fmt: skip
    prompt = list(range(1, 12))
    machine.add("a", None, [*prompt, 0], 4, n=1, num_emitted=0, greedy=False, has_stop=False)
    machine.add("b", None, [*prompt, 0, 0], 9, n=4, num_emitted=0, greedy=False, has_stop=False)
    machine.teardown()
    assert machine.core.stats().swaps_out > 0


def _engine(
    num_blocks: int,
    *,
    slots: int = 8,
    batch_tokens: int = 16,
    chunk: int = 8,
    make_runner: type[FaultyRunner | FaultyAheadRunner] = FaultyRunner,
) -> tuple[EngineCore, FaultyRunner | FaultyAheadRunner]:
    runner = make_runner(
        num_blocks=num_blocks, block_size=4, max_context_tokens=_CONTEXT, eos_token_id=_EOS, eos_one_in=_EOS_ONE_IN
    )
    backend = FakeAdapterBackend(lambda: 0.0)
    limits = EngineLimits(PlannerLimits(batch_tokens, chunk, slots), AdapterCacheLimits(8, 8), max_requests=64)
    core = EngineCore(runner, backend, limits)
    runner.tenant_of = core.tenant_of
    return core, runner


def _request(name: str, prompt: int, max_tokens: int, *, n: int = 1, tenant: str = "a") -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        tenant_id=TenantId(tenant),
        qos_class=QosClass.STANDARD,
        adapter_uid=None,
        prompt_token_ids=tuple(range(1, prompt + 1)),
        max_tokens=max_tokens,
        sampling=Sampling(seed=7),
        n=n,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 20), st.integers(1, 3)), min_size=2, max_size=8),
    num_blocks=st.integers(9, 12),
    make_runner=st.sampled_from([FaultyRunner, FaultyAheadRunner]),
)
def test_a_pool_too_small_for_all_preempts_and_every_text_stays_right(
    shapes: list[tuple[int, int, int]], num_blocks: int, make_runner: type[FaultyRunner | FaultyAheadRunner]
) -> None:
    core, runner = _engine(num_blocks, make_runner=make_runner)
    seen = Collector()
    for i, (prompt, max_tokens, n) in enumerate(shapes):
        request = _request(f"r{i}", prompt, max_tokens, n=n, tenant="ab"[i % 2])
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
    core, _ = _engine(6, make_runner=make_runner)
    seen = Collector()
    for i in range(3):
        request = _request(f"r{i}", 4, 16, tenant="abc"[i])
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
    core, _ = _engine(64, batch_tokens=9, chunk=4)
    core.add(_request("short", 1, 20), 0.0)
    core.step(0.0)
    core.add(_request("long", 32, 4), 0.0)
    for step in range(8):
        outputs = core.step(float(step))
        assert [o.request_id for o in outputs][:1] == ["short"], "the decode missed a step"
    assert {o.request_id for o in core.step(9.0)} == {"short", "long"}


def test_choices_share_the_prompts_blocks_and_count_it_once() -> None:
    core, _ = _engine(64)
    core.add(_request("r", 16, 4, n=4), 0.0)
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
    slow = _request("slow", 4, 2)
    core.add(EngineRequest(**{**slow.__dict__, "adapter_uid": AdapterUid("u")}), 0.0)
    core.add(_request("quick", 4, 2), 0.0)
    assert {o.request_id for o in core.step(0.0)} == {"quick"}


def test_what_can_never_fit_is_refused_and_names_the_field() -> None:
    core, _ = _engine(4)
    core.add(_request("fits", 8, 9), 0.0)
    for request, field in (
        (_request("r", 8, 10), "max_tokens"),
        (_request("r", _CONTEXT, 1), "prompt_token_ids"),
        (_request("r", 1, 1, n=9), "n"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            core.add(request, 0.0)
        assert refusal.value.violations[0].field == field
    while core.has_work():
        core.step(0.0)
    (end,) = core.take_ended()
    assert end.reason is FinishReason.STOP


def test_a_full_context_ends_a_choice() -> None:
    core, runner = _engine(32)
    core.add(_request("r", _CONTEXT - 3, 20), 0.0)
    outputs = [o for _ in range(9) for o in core.step(0.0)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert not runner.faults
    assert core.step_error is None


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    core, runner = _engine(16, batch_tokens=8, chunk=8, slots=1)
    core.add(_request("in the step", 8, 4), 0.0)
    core.add(_request("behind it", 8, 4), 0.0)
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
    core.add(EngineRequest(**{**_request("r", 4, 3).__dict__, "adapter_uid": AdapterUid("u")}), now)
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
    core.add(EngineRequest(**{**_request("r", 4, 3).__dict__, "adapter_uid": AdapterUid("u")}), now)
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


def _with_stops(request: EngineRequest) -> EngineRequest:
    return EngineRequest(**{**request.__dict__, "stop_token_ids": frozenset([_EOS])})


def _stopping_seed(prompt: int, max_tokens: int) -> int:
    """A seed whose text ends by itself, a few tokens in."""
    for seed in range(1000):
        request = EngineRequest(
            **{**_with_stops(_request("r", prompt, max_tokens)).__dict__, "sampling": Sampling(seed=seed)}
        )
        if 3 <= len(expected(request, 0)) < max_tokens - 3:
            return seed
    raise AssertionError("no text ends by itself")


def test_the_next_step_is_begun_before_the_last_one_has_ended() -> None:
    core, runner = _engine(64, make_runner=FaultyAheadRunner)
    core.add(_request("r", 8, 6), 0.0)
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
        core, _ = _engine(64, make_runner=make_runner)
        seen = Collector()
        sampling = Sampling(seed=_stopping_seed(8, 20))
        request = EngineRequest(**{**_with_stops(_request("r", 8, 20)).__dict__, "sampling": sampling})
        other = _request("other", 8, 30)
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
    core, runner = _engine(64, make_runner=FaultyAheadRunner)
    core.add(_request("r", 8, 20), 0.0)
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
    core, runner = _engine(64, slots=2, batch_tokens=9, chunk=8, make_runner=FaultyAheadRunner)
    assert isinstance(runner, FaultyAheadRunner)
    core.add(_request("first", 8, 20), 0.0)
    core.step(0.0)
    core.add(_request("second", 8, 20), 0.0)
    core.add(_request("behind", 8, 20), 0.0)
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
        core, _ = _engine(12, slots=2, make_runner=make_runner)
        for i, tenant in enumerate("aab"):
            core.add(_request(f"r{i}", 4, 30, tenant=tenant), 0.0)
        steps = 0
        while core.has_work():
            core.step(0.0)
            steps += 1
            assert steps < 400
        evicted.append((core.stats().evictions, core.stats().recomputed_tokens))
    assert evicted[0][0] > 0
    assert evicted[0] == evicted[1]
