"""What the draft model does in a step, and what that costs. StepPlanner asks it.

The draft model sees a sequence's tokens only when it is to guess: first those that it missed, the prompt among them, in
parts; then it guesses behind the last one. Its work counts in the quantum, by its share of the model's.
"""

from __future__ import annotations

from dataclasses import replace

from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

from manylora_worker.kinds.api import Draft, DraftModel
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.planning.slots import Scheduled, Unit

_NEAR = 8  # tokens unseen, from where a sequence waits for its last draw


class Drafts:
    def __init__(self, model: DraftModel | None) -> None:
        self._model = model
        # In whole numbers: what `_affordable` finds in floats may cost one more than there is.
        self._part, self._whole = (0, 1) if model is None else model.share.as_integer_ratio()

    def drafts(self, sequence: Sequence) -> bool:
        return self._model is not None and sequence.group.drafts

    def most_tokens(self, prompt_budget: int, most: int) -> int:
        """That the draft model may see in a step, in the time of so many of the prompt's."""
        return 0 if self._model is None else min(most, max(0, prompt_budget) * self._whole // self._part)

    def with_draft(self, unit: Unit, most: int, most_tokens: int) -> Scheduled | None:
        """None: the last draw is worth waiting for."""
        model, sequence = self._model, unit.sequence
        assert model is not None
        length = 0 if sequence.guessing is None else sequence.guessing.length()
        start, known = sequence.num_drafted_tokens, sequence.num_tokens - sequence.num_pending_tokens
        most = min(most, length, sequence.max_output_tokens - sequence.num_output_tokens - 1)
        most = min(most, model.max_context_tokens - known)
        if most < 1:
            return unit.chunk
        if sequence.num_pending_tokens and known - start <= _NEAR:
            return None
        count = min(known - start, most_tokens, self._affordable(unit))
        if count < 1:
            return unit.chunk
        guesses = 0
        if start + count == known and not sequence.num_pending_tokens:
            while guesses < most and self._fits(unit, count, guesses + 1):
                guesses += 1
            if not guesses:
                return unit.chunk
        return replace(unit.chunk, draft=Draft(start, sequence.tokens(start, start + count), guesses))

    def take(self, unit: Unit, chunk: Scheduled) -> int:
        """What the draft costs, which the quantum pays."""
        if chunk.draft is None:
            return 0
        cost = self._cost(len(chunk.draft.token_ids), chunk.draft.num_guesses)
        unit.tokens_left -= _tokens(unit.draft_cost + cost) - _tokens(unit.draft_cost)
        unit.draft_cost += cost
        return cost

    def _cost(self, num_tokens: int, num_guesses: int) -> int:
        work = num_tokens * PROMPT_TOKEN_COST + num_guesses * OUTPUT_TOKEN_COST
        return -(-self._part * work // self._whole)

    def _fits(self, unit: Unit, num_tokens: int, num_guesses: int) -> bool:
        taken = _tokens(unit.draft_cost + self._cost(num_tokens, num_guesses)) - _tokens(unit.draft_cost)
        return 1 + num_guesses + taken <= unit.tokens_left

    def _affordable(self, unit: Unit) -> int:
        """Tokens that the quantum can pay for beside its own next one."""
        free = (unit.tokens_left - 1) * OUTPUT_TOKEN_COST + _tokens(unit.draft_cost) * OUTPUT_TOKEN_COST
        return (free - unit.draft_cost) * self._whole // (self._part * PROMPT_TOKEN_COST)


def _tokens(cost: int) -> int:
    return -(-cost // OUTPUT_TOKEN_COST)
