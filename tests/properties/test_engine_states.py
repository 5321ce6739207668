"""EngineCore over a runner whose sequences keep a state: each chunk finds that of all tokens before it, whatever comes
and goes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import settings
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import QosClass, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import RecurrentRunner, Sampled, SequenceChunk, StepBatch
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.step_planner import PlannerLimits

from tests.properties.engine_rig import Rig
from tests.properties.engine_suite import (
    CONTEXT,
    EOS,
    EOS_ONE_IN,
    FaultyAheadRunner,
    FaultyRunner,
    make_engine,
    make_request,
)
from tests.properties.test_engine_machine import EngineMachine
from tests.properties.test_engine_masks import request_of, run

_STATE_BLOCKS = 2


class StatefulRunner(FaultyRunner):
    """A state is a hash of the tokens' KV so far, in each of the sequence's first blocks. It is a fault where a chunk's
    is not that of the tokens before it, or is another's."""

    state_blocks = _STATE_BLOCKS

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if self.fail_next:
            return super().execute(batch)
        chunks = [replace(each, block_table=each.block_table[_STATE_BLOCKS:]) for each in batch.chunks]
        states = [list(each.block_table[:_STATE_BLOCKS]) for each in batch.chunks]
        taken = [block_id for state in states for block_id in state]
        if len(set(taken)) < _STATE_BLOCKS * len(chunks):
            self._fail("two sequences of a step have one state, or one has none")
        size = self.block_size
        touched = [
            replace(c, token_ids=[0] * (size * _STATE_BLOCKS), start_position=0, block_table=state)
            for c, state in zip(chunks, states, strict=True)
        ]
        self.host_kv.check_step(StepBatch(touched))
        for chunk, state in zip(chunks, states, strict=True):
            self._check_state(chunk, state, set(batch.clear_blocks))
        sampled = super().execute(replace(batch, chunks=chunks))
        for chunk, state in zip(chunks, states, strict=True):
            if chunk.num_guesses:
                self._fail("a state cannot be taken back")
            end = chunk.start_position + len(chunk.token_ids)
            for index, block_id in enumerate(state):
                self._blocks[block_id][:16] = self._state(chunk, end, index)
                self._tenants[block_id] = self.tenant_of(chunk.sequence_id) if self.tenant_of else None
        return sampled

    def _check_state(self, chunk: SequenceChunk, state: SequenceOf[int], cleared: set[int]) -> None:
        assert self.tenant_of is not None
        for index, block_id in enumerate(state):
            if self._tenants[block_id] not in (None, self.tenant_of(chunk.sequence_id)) and block_id not in cleared:
                self._fail(f"the state's block {block_id} crosses tenants uncleared")
            if not chunk.start_position:
                continue
            found = bytes(self._blocks[block_id][:16])
            if block_id in cleared or found != self._state(chunk, chunk.start_position, index):
                self._fail(f"block {block_id} has not the state of {chunk.start_position} tokens")

    def _state(self, chunk: SequenceChunk, end: int, index: int) -> bytes:
        blocks = chunk.block_table[: -(-end // self.block_size)]
        context = b"".join(self._blocks[block_id] for block_id in blocks)[: end * 16]
        return hashlib.blake2b(context, digest_size=16, key=bytes([index])).digest()


class AheadStatefulRunner(StatefulRunner, FaultyAheadRunner): ...


class StatefulEngineMachine(EngineMachine):
    make_runner = StatefulRunner
    has_prefixes = False


TestStatefulEngine = StatefulEngineMachine.TestCase
TestStatefulEngine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


def _rig(num_blocks: int, slots: int, *, num_host_blocks: int = 0) -> Rig:
    return Rig.make(num_blocks, slots, make_runner=StatefulRunner, num_host_blocks=num_host_blocks)


def test_a_state_is_counted_and_charged_as_blocks_are() -> None:
    rig = _rig(20, 2)
    assert isinstance(rig.runner, RecurrentRunner)
    rig.add(TenantId("a"), 8, 3)
    rig.step()
    assert rig.core.blocks_held_by(TenantId("a")) == _STATE_BLOCKS + 2
    while rig.core.has_work():
        rig.step()  # holds what it is told to have held
    assert rig.core.stats().blocks_free == 20


def test_each_choice_computes_the_prompt_into_a_state_of_its_own() -> None:
    rig = _rig(40, 4)
    rig.add(TenantId("a"), 10, 6, n=3)
    while rig.core.has_work():
        rig.step()
    assert rig.core.flows()[TenantId("a"), QosClass.STANDARD].prompt_tokens == 30


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_preempted_state_is_swapped_or_computed_again(num_host_blocks: int) -> None:
    rig = _rig(16, 3, num_host_blocks=num_host_blocks)
    rig.core.set_share(TenantId("a"), TenantShare(soft_blocks=4))
    for _ in range(3):
        rig.add(TenantId("a"), 20, 24)
        rig.add(TenantId("b"), 12, 24)
    while rig.core.has_work():
        rig.step()  # each text is the reference's, each state that of its tokens
        assert rig.steps < 2000
    stats = rig.core.stats()
    assert stats.swaps_in == stats.swaps_out
    assert (stats.swaps_out if num_host_blocks else stats.evictions) > 0
    assert stats.host_blocks_free == num_host_blocks


def test_no_answer_is_speculated() -> None:
    rig = _rig(60, 1)
    rig.core.set_share(TenantId("a"), TenantShare(speculating=frozenset(QosClass)))
    rig.add(TenantId("a"), 8, 60)
    while rig.core.has_work():
        rig.step()
    assert rig.core.stats().guessed_tokens == 0


def test_a_mask_that_is_late_moves_no_state_twice() -> None:
    """On a GPU, where the layers of constrained rows are computed while their masks are made."""
    core, runner = make_engine(64, make_runner=AheadStatefulRunner)
    run(core, [request_of(i, (4, 20, 1, 100 * (i % 2), 1000, 1000, 20)) for i in range(4)])
    assert not runner.faults


def _core(num_blocks: int) -> EngineCore:
    runner = StatefulRunner(
        num_blocks=num_blocks, block_size=4, max_context_tokens=CONTEXT, eos_token_id=EOS, eos_one_in=EOS_ONE_IN
    )
    limits = EngineLimits(PlannerLimits(16, 8, 4), AdapterCacheLimits(8, 8), max_requests=64)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits)
    runner.tenant_of = core.tenant_of
    return core


def test_what_a_recurrent_model_cannot_do_is_refused_by_its_field() -> None:
    core = _core(6)
    core.check(make_request("fits", 8, 9))
    with pytest.raises(InvalidRequest, match="up to 18 tokens, the worker can hold 16"):
        core.check(make_request("long", 8, 10))
    scored = make_request("scored", 4, 4, n=2)
    with pytest.raises(InvalidRequest, match="n: this model's choices compute the prompt each"):
        core.check(replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0)))


# ---- each mutant breaks one rule, and the check above must see it


def _evicts_without_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = Parking.evict

    def mutant(self: Parking, sequence: Sequence) -> None:
        evict(self, sequence)
        sequence.num_computed_tokens = 4

    monkeypatch.setattr(Parking, "evict", mutant)


def _brings_another_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_ended = Parking.copy_ended

    def mutant(self: Parking, sequence: Sequence) -> None:
        copy_ended(self, sequence)
        sequence.block_table[:_STATE_BLOCKS] = sequence.block_table[:_STATE_BLOCKS][::-1]

    monkeypatch.setattr(Parking, "copy_ended", mutant)


def _counts_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "blocks_for", lambda self, num_tokens: -(-num_tokens // self.block_size))


@pytest.mark.parametrize(
    ("break_it", "num_host_blocks"),
    [(_evicts_without_its_state, 0), (_brings_another_state_back, 40), (_counts_no_state, 0)],
)
def test_the_check_feels_it(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], num_host_blocks: int
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_preempted_state_is_swapped_or_computed_again(num_host_blocks)
