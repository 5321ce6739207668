"""EngineCore with a draft model: what it is given to see is the sequence's own, and no output changes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from manylora_shared.ids import QosClass, TenantId
from manylora_worker.engine.core import EngineCore
from manylora_worker.kinds.api import DraftModel, Sampled, SequenceChunk, StepBatch
from manylora_worker.kinds.sequence import sequence_id_of
from manylora_worker.memory.tenant_shares import TenantShare

from tests.properties.engine_suite import (
    Collector,
    FaultyAheadRunner,
    FaultyRunner,
    expected,
    make_engine,
    make_request,
)
from tests.properties.test_engine_machine import EngineMachine


class _Guessing:
    """Guesses by what will be drawn, right up to a place that the sequence's length decides."""

    draft_model = DraftModel(0.2, 38)
    core: EngineCore
    block_size: int

    def guessed(self, chunk: SequenceChunk) -> SequenceChunk:
        draft = chunk.draft
        if draft is None:
            return chunk
        sequence = self.core._requests.sequence(sequence_id_of(chunk.sequence_id))
        start, end = draft.start_position, draft.start_position + len(draft.token_ids)
        whole = [*chunk.prompt_token_ids, *expected(sequence.group.request, sequence.choice)]
        assert list(draft.token_ids) == whole[start:end], "the draft model sees what is not there"
        assert end + max(0, draft.num_guesses - 1) <= len(chunk.block_table) * self.block_size
        if not draft.num_guesses:
            return replace(chunk, draft=None)
        assert end == chunk.start_position + len(chunk.token_ids), "it guesses from elsewhere"
        will_be = (whole[end:] + [0] * draft.num_guesses)[: draft.num_guesses]
        num_right = end % 4 if end % 3 else 99
        guesses = [token if i < num_right else 258 - token for i, token in enumerate(will_be)]
        return replace(chunk, token_ids=(*chunk.token_ids, *guesses), draft=None)


class DraftingRunner(_Guessing, FaultyRunner):
    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        return super().execute(replace(batch, chunks=[self.guessed(chunk) for chunk in batch.chunks]))


class DraftingAheadRunner(_Guessing, FaultyAheadRunner):
    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        return super().execute(replace(batch, chunks=[self.guessed(chunk) for chunk in batch.chunks]))


class DraftingMachine(EngineMachine):
    make_runner = DraftingAheadRunner

    num_right = 0  # over all runs

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        prompt=st.lists(st.integers(1, 9), min_size=1, max_size=12),
        max_tokens=st.integers(8, 24),
        n=st.integers(1, 3),
        greedy=st.booleans(),
        has_stop=st.booleans(),
    )
    def add_plain(self, tenant: str, prompt: list[int], max_tokens: int, n: int, greedy: bool, has_stop: bool) -> None:
        """From here on all draft."""
        self.runner.core = self.core  # type: ignore[union-attr]
        self.core._shares.drafts = lambda flow: True  # type: ignore[method-assign]
        self.add(tenant, None, prompt, max_tokens, n, 0, greedy, has_stop)
        self.steps(12)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            DraftingMachine.num_right += self.core.stats().right_guesses


@pytest.fixture
def nothing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_worker.kinds.guessing._FIRST_PRICE", 0.0)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_pauses")
class TestDraftingCore(DraftingMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)

    def runTest(self) -> None:
        super().runTest()
        assert DraftingMachine.num_right  # how many hangs on what Hypothesis draws, and that on what is imported


@pytest.mark.parametrize("make_runner", [DraftingRunner, DraftingAheadRunner])
@pytest.mark.parametrize(("n", "num_blocks"), [(1, 64), (3, 64), (3, 24)])
def test_every_token_is_the_references_in_fewer_steps(
    n: int, num_blocks: int, make_runner: type[FaultyRunner | FaultyAheadRunner]
) -> None:
    steps = []
    for drafting in (frozenset[QosClass](), frozenset(QosClass)):
        core, runner = make_engine(num_blocks, make_runner=make_runner)
        assert isinstance(runner, _Guessing)
        runner.core = core
        core.set_share(TenantId("a"), TenantShare(drafting=drafting))
        seen = Collector()
        for name in ("r", "s"):
            request = make_request(name, 8, 28, n=n)
            core.add(request, 0.0)
            seen.add(request)
        while core.has_work():
            seen.take(core.step(0.0), core.take_ended())
            core.check_invariants()
        assert not runner.faults
        stats = core.stats()
        steps.append(stats.steps)
        assert stats.failed_steps == 0, core.step_error
        assert (stats.guessed_tokens > stats.right_guesses > 0) == bool(drafting)
        assert core.flows()[TenantId("a"), QosClass.STANDARD].output_tokens == 2 * 28 * n
    assert n > 1 or steps[1] < steps[0]  # with more, few draws are left for guesses
