"""EngineCore over FakeRunner: whatever comes and goes, every output is the reference's, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_shared.composition import Part, key_of
from manylora_shared.errors import InvalidRequest, QuotaExceeded
from manylora_shared.ids import AdapterKey, AdapterName, AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.adapters.loading import LOOK_AGAIN_S
from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import AdapterTier, EngineRequest, Sampling
from manylora_worker.memory.prefix_cache import PrefixKeys, PrefixOptions
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.step_planner import PlannerLimits

from tests.properties.engine_suite import CONTEXT, EOS, EOS_ONE_IN, Collector, FaultyAheadRunner, FaultyRunner, expected

_STEMS = (tuple(range(1, 21)), (1, 2, 3, 4, 5, 6, *range(50, 64)), (7,) * 20)
"""Prompts begin with a part of one of these, so that they share prefixes."""
_PROMPTS = st.builds(
    lambda stem, shared, tail: [*stem[:shared], *tail],
    st.sampled_from(_STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 258), min_size=1, max_size=8),
)
_SIZES = {AdapterUid(f"uid{i}"): size for i, size in enumerate([1, 2, 3, 4])}
_COMPOSITIONS = st.lists(
    st.builds(Part, st.sampled_from(sorted(_SIZES)), st.sampled_from([1.0, -0.5])),
    min_size=2,
    max_size=4,
    unique_by=lambda part: part.uid,
).map(key_of)


class EngineMachine(RuleBasedStateMachine):
    make_runner: type[FaultyRunner | FaultyAheadRunner] = FaultyRunner
    has_prefixes = True

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
            max_context_tokens=CONTEXT,
            eos_token_id=EOS,
            eos_one_in=EOS_ONE_IN,
            adapters_on_device=lambda: self.backend.on_device,
            num_host_blocks=num_host_blocks,
            copy_polls=copy_polls,
        )
        limits = EngineLimits(
            PlannerLimits(slots + batch_tokens, chunk, slots),
            AdapterCacheLimits(host_bytes=8, device_bytes=device, host_loads=2, device_loads=1, max_overtakes=2),
            max_requests=64,
        )
        prefix = None
        if cache_share and self.has_prefixes:
            prefix = PrefixOptions(PrefixKeys(bytes(32), "model"), cache_share)
        self.core = EngineCore(self.runner, self.backend, limits, prefix, clears_freed=clears_freed)
        self.runner.tenant_of = self.core.tenant_of
        self.members: dict[str, set[str]] = {}
        self.pairs: set[tuple[str, str]] = set()
        self.runner.shares = lambda reader, writer: (reader, writer) in self.pairs
        self.seen = Collector()
        self.serial = 0
        self.failed_steps = 0

    def _take(self) -> None:
        self.seen.take(self.core.take_outputs(), self.core.take_ended())

    def _live(self) -> list[RequestId]:
        return [r for r in self.seen.requests if r not in self.seen.ends]

    @rule(
        tenant=st.sampled_from(["a", "b", "c"]),
        adapter=st.one_of(st.sampled_from([None, *sorted(_SIZES)]), _COMPOSITIONS),
        prompt=_PROMPTS,
        max_tokens=st.integers(1, 24),
        n=st.integers(1, 4),
        num_emitted=st.integers(0, 6),
        greedy=st.booleans(),
        has_stop=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 3, 12]),
        bad_words=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def add(
        self,
        tenant: str,
        adapter: AdapterKey | None,
        prompt: list[int],
        max_tokens: int,
        n: int,
        num_emitted: int,
        greedy: bool,
        has_stop: bool,
        min_tokens: int = 0,
        bad_words: Sequence[tuple[int, int]] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        """bad_words: (start, length) in what the output would be."""
        self.serial += 1
        request = EngineRequest(
            request_id=RequestId(f"r{self.serial}"),
            tenant_id=TenantId(tenant),
            qos_class=QosClass.STANDARD,
            adapter_uid=adapter,
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(
                seed=self.serial,
                temperature=0.0 if greedy else 1.0,
                min_tokens=min_tokens,
                prompt_logprobs=prompt_logprobs,
            ),
            stop_token_ids=frozenset([EOS]) if has_stop else frozenset(),
            n=n,
        )
        would_be = expected(request, 0)
        words = {tuple(would_be[start : start + length]) for start, length in bad_words} - {()}
        request = replace(request, bad_sequences=tuple(sorted(words)))
        if num_emitted:
            lengths = [min(num_emitted * (choice + 1) % 7, max_tokens - 1) for choice in range(n)]
            told = [expected(request, choice) for choice in range(n)]
            emitted = [tuple(each[:length]) for each, length in zip(told, lengths, strict=True)]
            has_ended = [choice > 0 and choice == num_emitted % n for choice in range(n)]
            open_ones = [None if ended else each for each, ended in zip(emitted, has_ended, strict=True)]
            sampling = replace(request.sampling, prompt_logprobs=None)  # told before the first token
            request = replace(request, emitted=tuple(open_ones), sampling=sampling)
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
        group=st.sampled_from([None, None, "g", "h"]),
    )
    def set_share(
        self,
        tenant: str,
        weight: int,
        bounds: tuple[int, int, int] | None,
        is_soft: bool,
        is_hard: bool,
        group: str | None,
    ) -> None:
        share = None
        if bounds is not None:
            if group is not None:
                others = self.members.setdefault(group, set())
                others.add(tenant)
                self.pairs |= {pair for other in others for pair in ((tenant, other), (other, tenant))}
            reserve, soft, hard = bounds
            share = TenantShare(
                dict.fromkeys(QosClass, weight),
                soft_blocks=reserve + soft if is_soft else None,
                hard_blocks=reserve + soft + hard if is_hard else None,
                reserve_blocks=reserve,
                cache_group=group,
            )
        self.core.set_share(TenantId(tenant), share)

    @rule(uid=st.sampled_from(sorted(_SIZES)), tenant=st.sampled_from([None, "a", "b"]))
    def prefetch(self, uid: AdapterUid, tenant: str | None) -> None:
        self.core.prefetch(uid, None if tenant is None else TenantId(tenant))

    @rule(tenant=st.sampled_from(["a", "b"]), uid=st.none() | st.sampled_from(sorted(_SIZES)))
    def pin(self, tenant: str, uid: AdapterUid | None) -> None:
        pins = [] if uid is None else [Pin(AdapterName(uid), uid, _SIZES[uid])]
        self.core.set_pins({TenantId(tenant): pins}, max(_SIZES.values()))

    @rule(adapters=st.booleans())
    def drop_caches(self, adapters: bool) -> None:
        if adapters:
            self.core.drop_adapters()
        else:
            self.core.drop_prefixes()

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
        is_computed = (self.core.stats().steps, self.core.num_in_flight) != before
        if not is_computed:
            self._check_rest()
        return is_computed

    def _check_rest(self) -> None:
        """No step can begin: whoever could go on waits for copies, and then it is soon asked whether they are over."""
        core = self.core
        loading = list(core._requests.loading)
        waits = [g for g in core._requests.groups if not g.is_paused and g not in loading]
        assert core._swapper.num_copying or not waits, "who could be computed is not, and nobody would try again"
        if core._swapper.num_copying:
            rest_s = core.rest_s()
            assert rest_s is not None
            assert rest_s < LOOK_AGAIN_S

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


TestEngineCore = pytest.mark.long(EngineMachine.TestCase)
TestEngineCore.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


class AheadEngineMachine(EngineMachine):
    make_runner = FaultyAheadRunner


TestAheadEngineCore = pytest.mark.long(AheadEngineMachine.TestCase)
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
