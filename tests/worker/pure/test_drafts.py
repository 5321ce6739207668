"""What the draft model does in a step: a quantum pays for it, and no token that it missed is left out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.kinds.api import DraftModel, EngineRequest, Sampling
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.guessing import FlowGuesses, Guessing, GuessTimes
from manylora_worker.kinds.sequence import GroupTimes, Sequence, SequenceGroup
from manylora_worker.planning.drafts import Drafts
from manylora_worker.planning.slots import Scheduled, Unit


def decoding(num_prompt: int, max_tokens: int = 200) -> Sequence:
    tenant = TenantId("t")
    request = EngineRequest(
        RequestId("r"), tenant, QosClass.STANDARD, None, tuple(range(num_prompt)), max_tokens, Sampling()
    )
    group = SequenceGroup(request, CacheScope(tenant, is_group=False), 0, GroupTimes(0.0), drafts=True)
    sequence = Sequence(0, group, 0, max_tokens)
    group.sequences = [sequence]
    sequence.output_token_ids = [7]
    sequence.num_computed_tokens = num_prompt
    times = GuessTimes()
    for _ in range(3):
        times.plain(1.0)
    sequence.guessing = Guessing(times, FlowGuesses(), 2)
    return sequence


def unit_of(sequence: Sequence) -> Unit:
    return Unit(sequence, 0, Scheduled(sequence, 1, samples=True), QUANTUM_TOKENS, QUANTUM_TOKENS)


@given(
    share=st.floats(0.02, 1.5),
    num_prompt=st.integers(1, 120),
    most_tokens=st.integers(0, 64),
    rights=st.lists(st.integers(0, 8), min_size=30, max_size=60),
)
def test_a_quantum_pays_for_all_that_is_done(
    share: float, num_prompt: int, most_tokens: int, rights: list[int]
) -> None:
    sequence = decoding(num_prompt)
    drafts = Drafts(DraftModel(share, 4096))
    unit = unit_of(sequence)
    seen = 0
    for right in rights:
        if unit.tokens_left < 1:
            unit = unit_of(sequence)
        chunk = drafts.with_draft(unit, unit.tokens_left - 1, most_tokens)
        assert chunk is not None, "nothing is pending"
        cost = drafts.take(unit, chunk) + (1 + chunk.num_guesses) * OUTPUT_TOKEN_COST
        unit.cost += cost
        unit.tokens_left -= 1 + chunk.num_guesses
        assert unit.tokens_left >= 0
        assert unit.cost + unit.tokens_left * OUTPUT_TOKEN_COST <= QUANTUM_TOKENS * OUTPUT_TOKEN_COST
        if chunk.draft is not None:
            draft = chunk.draft
            assert draft.start_position == seen, "a token is left out, or seen twice"
            assert 1 <= len(draft.token_ids) <= most_tokens
            end = draft.start_position + len(draft.token_ids)
            assert list(draft.token_ids) == list(sequence.tokens(seen, end))
            assert not draft.num_guesses or end == sequence.num_tokens
        sequence.advance(1, samples=True, draft=chunk.draft)
        sequence.num_steps_in_flight = sequence.num_pending_tokens = 0
        num_right = min(right, chunk.num_guesses)
        sequence.output_token_ids += [9] * (1 + num_right)
        sequence.num_computed_tokens += num_right
        if chunk.num_guesses:
            sequence.judged(chunk.num_guesses, num_right)
        seen = sequence.num_drafted_tokens
        assert seen <= sequence.num_computed_tokens


def test_what_a_quantum_can_pay_for_never_costs_more_than_it_has() -> None:
    """Every share p/q."""
    sequence = decoding(4000)
    shares = {numerator / denominator for denominator in range(1, 101) for numerator in range(1, denominator + 1)}
    for share, tokens_left in itertools.product(shares, range(1, QUANTUM_TOKENS + 1)):
        drafts = Drafts(DraftModel(share, 8192))
        unit = unit_of(sequence)
        unit.tokens_left = tokens_left
        while unit.tokens_left > 0:
            chunk = drafts.with_draft(unit, unit.tokens_left - 1, 4000)
            assert chunk is not None
            drafts.take(unit, chunk)
            unit.tokens_left -= 1 + chunk.num_guesses
            assert unit.tokens_left >= 0, share


def test_a_sequence_waits_for_its_draw_only_when_the_draft_model_has_seen_the_rest() -> None:
    sequence, drafts = decoding(100), Drafts(DraftModel(0.1, 4096))
    sequence.num_pending_tokens = 1
    unit = unit_of(sequence)
    chunk = drafts.with_draft(unit, 15, 64)
    assert chunk is not None
    assert chunk.draft is not None
    assert (len(chunk.draft.token_ids), chunk.num_guesses) == (64, 0)
    sequence.num_drafted_tokens = 100
    assert drafts.with_draft(unit, 15, 64) is None


def test_beyond_the_draft_models_context_nothing_is_guessed() -> None:
    sequence = decoding(100)
    chunk = Drafts(DraftModel(0.1, 101)).with_draft(unit_of(sequence), 15, 200)
    assert chunk is not None
    assert chunk.draft is None
    chunk = Drafts(DraftModel(0.1, 102)).with_draft(unit_of(sequence), 15, 200)
    assert chunk is not None
    assert chunk.num_guesses == 1


def test_without_a_draft_model_nobody_drafts() -> None:
    assert not Drafts(None).drafts(decoding(4))
    assert Drafts(None).most_tokens(100, 100) == 0
    assert Drafts(DraftModel(0.5, 10)).most_tokens(30, 100) == 60
