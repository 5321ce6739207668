"""Which sequences may guess. StepPlanner asks, EngineCore tells what steps took."""

from __future__ import annotations

from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.guessing import FlowGuesses, Guessing, GuessTimes, Turn
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.kinds.speculation import FIRST_GUESSES

_MOST_FLOWS = 4096  # that are remembered
_FIRST_DRAFTED = 2
_MISSED = 2  # steps from one draw to the next, at most: between them the sequence was out


class Guesses:
    def __init__(self, draft_share: float) -> None:
        self._draft_share = draft_share
        self._times = GuessTimes()
        self._flows: dict[FlowKey, FlowGuesses] = {}  # the one that was asked for last comes last
        self._step = 0
        self._last_prompt = 0  # the step that had prompts last

    def planned(self, num_running: int) -> None:
        self._times.rows = num_running

    def begin(self, sequence: Sequence, *, drafts: bool) -> None:
        if sequence.guessing is None:
            flow = self._flows.pop(sequence.flow, None) or FlowGuesses()
            self._flows[sequence.flow] = flow
            sequence.guessing = Guessing(self._times, flow, _FIRST_DRAFTED if drafts else FIRST_GUESSES)
            if len(self._flows) > _MOST_FLOWS:
                del self._flows[next(iter(self._flows))]

    def step_over(self, num_prompt_tokens: int, plain: int, seconds: float) -> None:
        """plain: sequences that it computed, all without guesses; else 0. seconds: since the step before."""
        self._step += 1
        if num_prompt_tokens:
            self._last_prompt = self._step
        elif plain and plain == self._times.rows:
            self._times.plain(seconds)

    def drew(self, sequence: Sequence, turn: Turn, num_guesses: int, num_tokens: int, now: float) -> None:
        """Of the step that is over."""
        guessing = sequence.guessing
        if guessing is None:
            return
        last, guessing.drawn = guessing.drawn, (self._step, now)
        if turn is Turn.PLAIN:
            guessing.drew(turn, num_tokens, 1.0)
            return
        is_known = last is not None and last[0] >= max(self._last_prompt, self._step - _MISSED)
        seconds = now - last[1] if last is not None and is_known else None
        drafts = sequence.speculation is None
        cost = self._times.cost(num_guesses, seconds, self._draft_share if drafts else 0.0)
        rate = 0.0 if sequence.speculation is None else sequence.speculation.rate
        catches_up = drafts and turn is Turn.GUESSING and not num_guesses
        guessing.drew(turn, num_tokens, cost, rate, catches_up=catches_up)
