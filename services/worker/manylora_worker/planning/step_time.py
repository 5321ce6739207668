"""How long steps take, and so how many prompt tokens one may have. Pure; written by EngineCore and read by StepPlanner.

All that is in a slot gets its next token at a step's end, and who comes anew is computed in the next step at the
earliest. So a step's length is what one tenant's prompts cost every other tenant. `max_batch_tokens` bounds it in
tokens, which is another time on each device, model and batch; here it is bounded in time, as Sarathi-Serve (Agrawal and
others, 2024) chooses its token budget by profiling, but from the steps themselves.

Two averages are kept: of steps that only decode, and of what a prompt token adds to that. A step is then given as many
prompt tokens as fit into the target. Where every step has prompts, the first average is old and the second takes in
what it lacks: the target is met all the same, for that is where the two agree with what is measured.

A device's first steps may be slow once, by a hundred times: memory is set up, kernels are compiled at their first use.
An average that began with such a step would hold prompts up for dozens of steps. Nothing makes a step fast once, so
among the first ones whatever is less than the average is the average from then on: it is right after one step that is
not slow. A device that is slow at each step is held to its target from the first one on.
"""

from __future__ import annotations

_WEIGHT = 1 / 8
"""Of one step."""
_FIRST = 8
"""So many steps may be slow once."""
_MOST = 2.0
"""A step counts as so many times the average at most: one that was held up by others says nothing of the next."""
LEAST_PROMPT_TOKENS = 32
"""However slow steps are, prompts go on by so many tokens in each."""
LEAST_CHUNK_TOKENS = 64
"""And the first of them by so many, if it has them: of a long prompt in small parts, most of the time is their
beginning. Several short ones are as quick in several steps, and what decodes waits for less at a time."""


class StepTime:
    """
    Args:
        target_s: how long a step should take at most; None: any time.
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decode = Average()
        """Of a step without prompts."""
        self._token = Average()
        """What a prompt token adds."""

    def measured(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long."""
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            self._decode.take(seconds)
            return
        if seconds < self._decode.seconds:
            self._decode.doubt()
        self._token.take(max(0.0, seconds - self._decode.seconds) / num_prompt_tokens)

    def max_prompt_tokens(self) -> int | None:
        """Of the next step; None: any number."""
        if self._target_s is None or not self._token.seconds:
            return None
        return max(LEAST_PROMPT_TOKENS, int((self._target_s - self._decode.seconds) / self._token.seconds))


class Average:
    """Of what was seen lately. Among the first ones it falls at once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 while nothing was seen. For reading."""
        self._num_seen = 0
        """Up to `_FIRST`."""

    @property
    def is_young(self) -> bool:
        """What it is may be of steps that were slow once."""
        return self._num_seen < _FIRST

    def take(self, seen: float) -> None:
        """0 among the first ones is nothing that was seen."""
        if self.is_young:
            if not seen:
                return
            self._num_seen += 1
            if not self.seconds or seen < self.seconds:
                self.seconds = seen
                return
        self.seconds += _WEIGHT * (min(seen, _MOST * self.seconds) - self.seconds)

    def doubt(self) -> None:
        """What was seen cannot be right. If it is all from the first ones, it was slow for another reason: it is as if
        nothing had been seen."""
        if self.is_young:
            self.seconds = 0.0
