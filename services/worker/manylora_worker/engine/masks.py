"""Whose masks of the next draw are being made, and what comes of it. EngineCore calls it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from manylora_worker.engine.endings import Endings
from manylora_worker.kinds.api import FinishReason
from manylora_worker.kinds.sequence import Sequence


class Masks:
    def __init__(self, endings: Endings) -> None:
        self._endings = endings
        self._making: dict[Sequence, None] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._making)

    def take(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """The tokens that were drawn last, maybe none. Nothing without a constraint."""
        if sequence.matcher is not None:
            sequence.matcher.take(tuple(token_ids))
            self._making[sequence] = None

    def pump(self, now: float) -> None:
        """Where one takes long, none is waited for any more: its sequence is not planned, and the others are."""
        waits = True
        for sequence in list(self._making):
            if sequence.is_finished:
                del self._making[sequence]
                continue
            matcher = sequence.matcher
            assert matcher is not None
            if not matcher.is_done(waits=waits):
                waits = False
                continue
            del self._making[sequence]
            sequence.awaits_mask = False
            if matcher.error:
                message = f"the constraint cannot be kept: {matcher.error}"
                self._endings.end_request(sequence.group, FinishReason.ERROR, message, now)
            elif matcher.is_over:
                self._endings.end_choice(sequence, FinishReason.STOP, now)
