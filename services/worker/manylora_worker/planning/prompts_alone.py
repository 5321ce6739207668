"""Which prompts are worth a step without decodes. Pure; written by EngineCore, and by StepPlanner for what it plans.

Who comes anew waits for a step with its prompt, and so for what others decode in it. Three averages are kept, of the
worker's own steps: what decoding takes, what a prompt token adds, and what a step that has prompts alone takes beside
their tokens. Where that last one is much less than the first, short prompts that others' decodes would hold up are
worth a step of their own: they gain the difference, and all that decodes loses the last. So there is a *credit*, which
grows with each step: what decodes lose is a small part of the time. Where a step takes about as long for one row as for
a hundred, because its weights are read either way, prompts alone are not worth it; now and then they are tried, since
nothing else tells of it under load.

Beside a flood every step has prompts, and what decoding takes is not seen by itself. What such a step took more or less
than expected is laid to decodes and prompts in proportion. So these averages follow the load, which those of StepTime
do not, and are not as sure: where they are wrong, the credit bounds what it costs.
"""

from __future__ import annotations

from manylora_worker.planning.step_time import Average

_LEAST_GAIN = 1 / 2
"""What prompts alone gain of others' decodes is at least so much of what these lose."""
_SHORT = 2.0
"""Prompts are short whose tokens take at most so many times what decoding does."""
_LOST_SHARE = 1 / 40
"""Of the time decodes lose so much at most to steps of prompts alone."""
_MOST_CREDIT = 4
"""So many steps of prompts alone may have been saved up."""
_TRIED_AGAIN = 1000
"""Steps after which it may be another time that prompts alone take."""


class PromptsAlone:
    def __init__(self) -> None:
        self._decode = Average()
        """What decoding takes in a step."""
        self._token = Average()
        """What a prompt token adds."""
        self._alone = Average()
        """What a step that has prompts alone takes, without what their tokens add."""
        self._num_since_alone = 0
        """Steps since the last one that had short prompts alone."""
        self._credit_s = 0.0
        """What decodes may lose now."""

    def measured(self, num_prompt_tokens: int, seconds: float, *, has_decodes: bool) -> None:
        """A step with so many tokens of prompts took so long."""
        if seconds <= 0:
            return
        self._num_since_alone += 1
        self._credit_s = min(self._credit_s + _LOST_SHARE * seconds, _MOST_CREDIT * self._alone.seconds)
        if not num_prompt_tokens:
            self._decode.take(seconds)
        elif has_decodes or not self._decode.seconds:
            self._mixed(num_prompt_tokens, seconds)
        elif self._are_short(num_prompt_tokens):
            self._num_since_alone = 0
            self._alone.take(max(0.0, seconds - num_prompt_tokens * self._token.seconds))

    def are_worth_a_step(self, num_prompt_tokens: int) -> bool:
        """Whether the next step should have so many tokens of prompts and leave out decodes, if it could have both."""
        alone, decode = self._alone.seconds, self._decode.seconds
        is_gain = alone > 0 and decode - alone >= _LEAST_GAIN * alone
        is_tried = self._num_since_alone >= _TRIED_AGAIN
        return self._are_short(num_prompt_tokens) and self._credit_s >= alone and (is_gain or is_tried)

    def left_out_decodes(self) -> None:
        """The step that begins now has prompts alone, though there were decodes."""
        self._credit_s -= self._alone.seconds

    def _mixed(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with both; or with prompts alone, while nothing has decoded yet."""
        if seconds < self._decode.seconds:
            self._decode.doubt()
        expected = self._decode.seconds + num_prompt_tokens * self._token.seconds
        if not self._decode.seconds or self._token.is_young:
            self._token.take(max(0.0, seconds - self._decode.seconds) / num_prompt_tokens)
        else:
            self._decode.take(self._decode.seconds * seconds / expected)
            self._token.take(self._token.seconds * seconds / expected)

    def _are_short(self, num_prompt_tokens: int) -> bool:
        """What a step with prompts takes beside their tokens can be told from it, and is felt."""
        return num_prompt_tokens * self._token.seconds <= _SHORT * self._decode.seconds
