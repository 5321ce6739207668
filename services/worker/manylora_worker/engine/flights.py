"""Steps that are begun and not ended, oldest first: one, or two with an AheadRunner. EngineCore writes it. A Part is
one sequence's share of a step.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from manylora_shared.ids import QosClass

from manylora_worker.kinds.api import (
    AheadRunner,
    AheadStep,
    LosableRunner,
    ModelRunner,
    PendingStep,
    RunnerLost,
    Sampled,
    SequenceChunk,
    StepBatch,
)
from manylora_worker.kinds.constraint import barred
from manylora_worker.kinds.guessing import MOST_SPECULATING, Turn
from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.memory.block_pool import BlockWork
from manylora_worker.planning.slots import Scheduled


@dataclass(slots=True)
class Part:
    scheduled: Scheduled
    holding_id: int
    num_new_tokens: int  # prompt tokens that count
    num_recomputed_tokens: int
    end: int  # the position up to which the step computes
    num_scored: int  # of the prompt's tokens
    mask_follows: bool = False
    is_undrawn: bool = False  # no mask came
    turn: Turn = Turn.PLAIN

    @property
    def is_answered(self) -> bool:
        return self.scheduled.samples or self.num_scored > 0

    def leave(self) -> None:
        """Its step is over."""
        sequence = self.scheduled.sequence
        sequence.num_guesses = 0
        sequence.num_steps_in_flight -= 1
        sequence.num_pending_tokens -= self.scheduled.samples


class Begun(NamedTuple):
    """A step that was planned and is not submitted yet."""

    parts: SequenceOf[Part]
    work: BlockWork
    begun_s: float
    qos_class: QosClass  # the highest of those that ran or waited


class Flight(NamedTuple):
    parts: SequenceOf[Part]
    work: BlockWork
    begun_s: float
    qos_class: QosClass
    pending: PendingStep
    undrawn: AheadStep | None = None  # it draws when the masks of some of its rows are there

    @property
    def is_trial(self) -> bool:
        return all(part.scheduled.sequence.group.request.is_trial for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return sum(part.scheduled.num_tokens + part.scheduled.num_guesses for part in self.parts)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(part.num_new_tokens + part.num_recomputed_tokens for part in self.parts)

    @property
    def num_plain(self) -> int:
        """Sequences, where few are there and none guesses; else 0."""
        num_parts = len(self.parts)
        is_plain = num_parts <= MOST_SPECULATING and all(part.turn is Turn.PLAIN for part in self.parts)
        return num_parts if is_plain else 0


class Over:
    """The runner computed the step at once, or did not take it."""

    def __init__(self, outcome: SequenceOf[Sampled] | Exception) -> None:
        self._outcome = outcome

    def is_over(self) -> bool:
        return True

    def result(self) -> SequenceOf[Sampled]:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Flights:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self._losable = runner if isinstance(runner, LosableRunner) else None
        self._flights: deque[Flight] = deque()  # oldest first

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def run_ahead(self) -> bool:
        return self._ahead is not None

    @property
    def must_wait(self) -> bool:
        return len(self._flights) > (self._ahead is not None)

    @property
    def is_over(self) -> bool:
        """The oldest needs no wait."""
        return bool(self._flights) and isinstance(self._flights[0].pending, Over)

    @property
    def alone(self) -> Flight | None:
        """The one that the runner computes, where another may be begun beside it; not where masks follow."""
        if self._ahead is None or len(self._flights) != 1:
            return None
        (flight,) = self._flights
        return flight if flight.undrawn is None and not flight.pending.is_over() else None

    def check(self) -> None:
        """Raises RunnerLost."""
        if self._losable is not None:
            self._losable.check()

    def submit(self, batch: StepBatch, begun: Begun) -> None:
        """At once, or beside what comes next. An exception is the step's result, but for RunnerLost."""
        pending: PendingStep
        undrawn = None
        try:
            if self._ahead is None:
                pending = Over(self._runner.execute(batch))
            else:
                pending = ahead = self._ahead.submit(batch)
                undrawn = ahead if any(part.mask_follows for part in begun.parts) else None
        except RunnerLost:
            raise
        except Exception as error:  # whatever it is, it ends the batch's requests (EngineCore.end_step)
            pending = Over(_without_locals(error))
        self._flights.append(Flight(*begun, pending, undrawn))

    @property
    def undrawn(self) -> Flight | None:
        """The newest, where masks follow."""
        return self._flights[-1] if self._flights and self._flights[-1].undrawn is not None else None

    def draw(self, masks: Mapping[int, bytes]) -> None:
        """Of `undrawn`. masks: by holding id. An exception is the step's result, but for RunnerLost."""
        flight = self._flights.pop()
        step = flight.undrawn
        assert step is not None
        for part in flight.parts:
            part.is_undrawn = part.mask_follows and part.holding_id not in masks
        flight = flight._replace(undrawn=None)
        try:
            step.draw(masks)
        except RunnerLost:
            raise
        except Exception as error:
            flight = flight._replace(pending=Over(_without_locals(error)))
        self._flights.append(flight)

    def wait(self) -> SequenceOf[Sampled] | Exception:
        """Of the oldest. Raises RunnerLost."""
        if self._flights[0].undrawn is not None:
            self.draw({})
        try:
            return self._flights[0].pending.result()
        except RunnerLost:
            raise
        except Exception as error:
            return _without_locals(error)

    def end(self) -> Flight:
        """Removes the oldest."""
        return self._flights.popleft()

    def checked(self, flight: Flight, result: SequenceOf[Sampled] | Exception) -> SequenceOf[Sampled] | Exception:
        """The result, or what is wrong with it."""
        if isinstance(result, Exception):
            return result
        expected = [part.holding_id for part in flight.parts if part.is_answered]
        if [sampled.sequence_id for sampled in result] != expected:
            return RuntimeError("the model's answer is not that of the batch")
        undrawn = {part.holding_id for part in flight.parts if part.is_undrawn}
        for sampled in result:
            if sampled.error is not None or sampled.sequence_id in undrawn:
                continue
            for token_id in (sampled.token_id, *sampled.further):
                if not 0 <= token_id < self._runner.vocab_size:
                    return RuntimeError(f"token {token_id} is not in the vocabulary")
        return result


def _without_locals(error: Exception) -> Exception:
    # What the failed step had on the device hangs on its frames, and the next step may need that room. An Over that
    # raises the error is in a cycle with it. The traceback still says where it was.
    errors: list[BaseException] = [error]
    for each in errors:  # it grows
        traceback.clear_frames(each.__traceback__)
        errors += [other for other in (each.__cause__, each.__context__) if other is not None and other not in errors]
    return error


def part_of(item: Scheduled) -> Part:
    sequence = item.sequence
    is_prefill = sequence.status is SequenceStatus.PREFILL
    num_new_tokens = sequence.num_new_tokens(item.num_tokens) if is_prefill else 0
    end = sequence.num_computed_tokens + item.num_tokens
    has_guesses = item.num_guesses > 0 or item.draft is not None
    turn = Turn.PLAIN if sequence.guessing is None else sequence.guessing.begins(guesses=has_guesses)
    return Part(
        scheduled=item,
        holding_id=sequence.holding_id,
        num_new_tokens=num_new_tokens,
        num_recomputed_tokens=item.num_tokens - num_new_tokens if is_prefill else 0,
        end=end,
        num_scored=len(sequence.group.scored(sequence.num_computed_tokens, end)),
        mask_follows=item.samples and sequence.awaits_mask,
        turn=turn,
    )


def mask_of(sequence: Sequence) -> bytes:
    """Of its next draw; no token is pending."""
    assert sequence.matcher is not None
    bars = sequence.group.bars
    mask = sequence.matcher.mask
    return mask if bars is None else barred(mask, bars.after(sequence.output_token_ids, 0))


def chunk_of(item: Scheduled, *, is_merged: bool = False) -> SequenceChunk:
    """is_merged: its adapter is in the base model's weights."""
    sequence, request = item.sequence, item.sequence.group.request
    bars: SequenceOf[tuple[int, int]] = ()
    mask: bytes | None = None
    if item.samples and sequence.matcher is not None:
        mask = None if sequence.awaits_mask else mask_of(sequence)
    elif item.samples and sequence.group.bars is not None:
        bars = sequence.group.bars.after(sequence.output_token_ids, sequence.num_pending_tokens)
    return SequenceChunk(
        sequence_id=sequence.holding_id,
        token_ids=(*sequence.next_tokens(item.num_tokens), *item.guesses),
        start_position=sequence.num_computed_tokens,
        block_table=sequence.block_table,
        adapter_uid=None if is_merged else request.adapter_uid,
        samples=item.samples,
        sampling=request.sampling,
        choice=sequence.choice,
        output_index=sequence.num_output_tokens,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        bars=bars,
        scored=sequence.group.scored(sequence.num_computed_tokens, sequence.num_computed_tokens + item.num_tokens),
        mask=mask,
        mask_follows=item.samples and sequence.awaits_mask,
        num_guesses=item.num_guesses,
        draft=item.draft,
    )
