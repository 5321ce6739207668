"""How long steps take, and so how many prompt tokens one may have. Pure; written by EngineCore and read by StepPlanner.

All that is in a slot gets its next token at a step's end, and who comes anew is computed in the next step at the
earliest. So a step's length is what one tenant's prompts cost every other tenant. `max_batch_tokens` bounds it in
tokens, which is another time on each device, model and batch; here it is bounded in time, as Sarathi-Serve (Agrawal and
others, 2024) chooses its token budget by profiling, but from the steps themselves.

Two averages are kept: of steps that only decode, and of what a prompt token adds to that. A step is then given as many
prompt tokens as fit into the target. Where every step has prompts, the first average is old and the second takes in
what it lacks: the target is met all the same, for that is where the two agree with what is measured.
"""

from __future__ import annotations

_WEIGHT = 1 / 8
"""Of one step."""
_MOST = 2.0
"""A step counts as so many times the average at most: one that was held up by others says nothing of the next."""
LEAST_PROMPT_TOKENS = 32
"""However slow steps are, prompts go on by so many tokens in each."""


class StepTime:
    """
    Args:
        target_s: how long a step should take at most; None: any time.
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decode_s = 0.0
        """Of a step without prompts; 0 while there was none."""
        self._token_s = 0.0
        """What a prompt token adds; 0 while none was computed, or where it adds nothing."""

    def measured(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long."""
        if seconds <= 0:
            return
        if num_prompt_tokens:
            self._token_s = _average(self._token_s, max(0.0, seconds - self._decode_s) / num_prompt_tokens)
        else:
            self._decode_s = _average(self._decode_s, seconds)

    def max_prompt_tokens(self) -> int | None:
        """Of the next step; None: any number."""
        if self._target_s is None or not self._token_s:
            return None
        return max(LEAST_PROMPT_TOKENS, int((self._target_s - self._decode_s) / self._token_s))


def _average(before: float, seen: float) -> float:
    """0: nothing was seen before."""
    return seen if not before else before + _WEIGHT * (min(seen, _MOST * before) - before)
