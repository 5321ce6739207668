"""Whose masks of the next draw are being made, and what comes of it. EngineCore calls it.

A runner that goes ahead computes a row's layers while its mask is made, and draws behind them. A row whose mask takes
longer than the layers draws nothing in that step, and has its last token computed again when the mask is there. A
recurrent model's layers wait for the mask: a token that is computed again would move its state twice.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from manylora_worker.engine.endings import Endings
from manylora_worker.engine.flights import Flight, Flights, mask_of
from manylora_worker.kinds.api import AheadStep, FinishReason
from manylora_worker.kinds.constraint import Matcher
from manylora_worker.kinds.sequence import Sequence

_PATIENCE = 2  # waits of a moment, once the layers are over


class Masks:
    def __init__(self, endings: Endings, flights: Flights, *, is_recurrent: bool) -> None:
        self._endings = endings
        self._flights = flights
        self._follow = flights.run_ahead and not is_recurrent
        self._making: dict[Sequence, None] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._making)

    def take(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """The tokens that were drawn last, maybe none. Nothing without a constraint."""
        if sequence.matcher is not None:
            sequence.masks_follow = self._follow
            sequence.matcher.take(tuple(token_ids))
            self._making[sequence] = None

    def came_too_late(self, sequence: Sequence) -> None:
        """The step is over, and drew nothing of it."""
        sequence.is_undrawn = False
        sequence.num_computed_tokens -= 1
        self._making[sequence] = None

    def pump(self, now: float) -> None:
        """Where one takes long, none is waited for any more: its sequence is not planned, and the others are."""
        if (flight := self._flights.undrawn) is not None:
            self._draw(flight, now)
        waits = not self._flights.run_ahead
        for sequence in list(self._making):
            if sequence.is_finished:
                del self._making[sequence]
            elif _matcher(sequence).is_done(waits=waits):
                self._made(sequence, now)
            else:
                waits = False

    def _draw(self, flight: Flight, now: float) -> None:
        late = [part for part in flight.parts if part.mask_follows]
        assert flight.undrawn is not None
        _wait([_matcher(part.scheduled.sequence) for part in late], flight.undrawn)
        for sequence in (part.scheduled.sequence for part in late):
            if not sequence.is_finished and _matcher(sequence).is_done(waits=False):
                self._made(sequence, now)
        masks = {}
        for part in late:
            sequence = part.scheduled.sequence
            sequence.is_undrawn = sequence in self._making
            if not sequence.is_undrawn and not sequence.is_finished:
                masks[part.holding_id] = mask_of(sequence)
        self._flights.draw(masks)

    def _made(self, sequence: Sequence, now: float) -> None:
        matcher = _matcher(sequence)
        del self._making[sequence]
        sequence.awaits_mask = sequence.num_pending_tokens > 0
        is_in_vain = sequence.num_steps_in_flight > 0
        if matcher.error:
            message = f"the constraint cannot be kept: {matcher.error}"
            self._endings.end_request(sequence.group, FinishReason.ERROR, message, now, refund=is_in_vain)
        elif matcher.is_over:
            self._endings.end_choice(sequence, FinishReason.STOP, now, refund=is_in_vain)


def _matcher(sequence: Sequence) -> Matcher:
    assert sequence.matcher is not None
    return sequence.matcher


def _wait(matchers: SequenceOf[Matcher], step: AheadStep) -> None:
    patience = _PATIENCE
    for matcher in matchers:
        while not matcher.is_done(waits=True):
            patience -= step.is_over()
            if not patience:
                return
