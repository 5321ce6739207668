"""Steps that are begun and not ended: what the engine has to remember of each.

A Part is one sequence's share of a step; EngineCore makes one when the step is begun, and settles it when it is over.
Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from manylora_worker.engine.api import PendingStep, Sampled, SequenceChunk
from manylora_worker.engine.block_pool import BlockWork
from manylora_worker.engine.sequence import SequenceStatus
from manylora_worker.engine.step_planner import Scheduled


@dataclass(slots=True)
class Part:
    """One sequence's part of a step in flight."""

    scheduled: Scheduled
    holding_id: int
    num_new_tokens: int
    """Prompt tokens that count."""
    num_recomputed_tokens: int
    end: int
    """The position up to which the step computes."""


class Flight(NamedTuple):
    """A step that is begun and not ended."""

    parts: SequenceOf[Part]
    work: BlockWork
    pending: PendingStep
    begun_s: float


class Over:
    """A step that is over: the runner computed it at once, or did not take it."""

    def __init__(self, outcome: SequenceOf[Sampled] | Exception) -> None:
        self._outcome = outcome

    def result(self) -> SequenceOf[Sampled]:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def part_of(item: Scheduled) -> Part:
    sequence = item.sequence
    is_prefill = sequence.status is SequenceStatus.PREFILL
    num_new_tokens = sequence.num_new_tokens(item.num_tokens) if is_prefill else 0
    return Part(
        scheduled=item,
        holding_id=sequence.holding_id,
        num_new_tokens=num_new_tokens,
        num_recomputed_tokens=item.num_tokens - num_new_tokens if is_prefill else 0,
        end=sequence.num_computed_tokens + item.num_tokens,
    )


def chunk_of(item: Scheduled) -> SequenceChunk:
    sequence, request = item.sequence, item.sequence.group.request
    return SequenceChunk(
        sequence_id=sequence.holding_id,
        token_ids=sequence.next_tokens(item.num_tokens),
        start_position=sequence.num_computed_tokens,
        block_table=sequence.block_table,
        adapter_uid=request.adapter_uid,
        samples=item.samples,
        sampling=request.sampling,
        choice=sequence.choice,
        output_index=sequence.num_output_tokens,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
    )
