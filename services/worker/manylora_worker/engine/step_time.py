"""How long steps take, and so how many prompt tokens one may have, and which prompts are worth a step without decodes.
Pure; written by EngineCore, but for what StepPlanner says of its plan.

All that is in a slot gets its next token at a step's end, and who comes anew is computed in the next step at the
earliest. So a step's length is what one tenant's prompts cost every other tenant. `max_batch_tokens` bounds it in
tokens, which is another time on each device, model and batch; here it is bounded in time, as Sarathi-Serve (Agrawal and
others, 2024) chooses its token budget by profiling, but from the steps themselves.

Two averages are kept: of steps that only decode, and of what a prompt token adds to that. A step is then given as many
prompt tokens as fit into the target. What a step with both took more or less than expected is laid to both in
proportion: the target is met all the same, for that is where the two agree with what is measured.

A third average is of steps that have prompts alone: what such a step takes beside its tokens. Where that is much less
than what decoding takes, short prompts that others' decodes would hold up are worth a step of their own: they gain the
difference, and all that decodes loses that third time. So there is a *credit*, which grows with each step: what decodes
lose is a small part of the time. Where a step takes about as long for one row as for a hundred, because its weights are
read either way, prompts alone are not worth it; now and then they are tried, since nothing else tells of it under load.

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
LEAST_PROMPT_TOKENS = 64
"""However slow steps are, prompts go on by so many tokens in each: with few, most of a step's time is its beginning."""
_LEAST_GAIN = 1 / 2
"""What prompts alone gain of others' decodes is at least so much of what these lose."""
_SHORT = 2.0
"""Prompts are short whose tokens take at most so many times what decoding does."""
_LOST_SHARE = 1 / 40
"""Of the time decodes lose so much at most to steps of prompts alone."""
_MOST_CREDIT = 4
"""Steps of prompts alone that may follow one another."""
_TRIED_AGAIN = 1000
"""Steps after which it may be another time that prompts alone take."""


class StepTime:
    """
    Args:
        target_s: how long a step should take at most; None: any time.
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decode = _Average()
        """Of a step without prompts."""
        self._token = _Average()
        """What a prompt token adds."""
        self._alone = _Average()
        """Of a step that has prompts alone, without what their tokens add."""
        self._num_since_alone = 0
        """Steps since the last one that had short prompts alone."""
        self._credit_s = 0.0
        """What decodes may lose now to steps of prompts alone."""

    def measured(self, num_prompt_tokens: int, seconds: float, *, has_decodes: bool = True) -> None:
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
        else:
            self._token.take(max(0.0, seconds - (self._alone.seconds or self._decode.seconds)) / num_prompt_tokens)

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

    def max_prompt_tokens(self) -> int | None:
        """Of the next step; None: any number."""
        if self._target_s is None or not self._token.seconds:
            return None
        return max(LEAST_PROMPT_TOKENS, int((self._target_s - self._decode.seconds) / self._token.seconds))

    def are_worth_a_step(self, num_prompt_tokens: int) -> bool:
        """Whether the next step should have so many tokens of prompts and leave out decodes, if it could have both."""
        alone, decode = self._alone.seconds, self._decode.seconds
        is_gain = alone > 0 and decode - alone >= _LEAST_GAIN * alone
        is_tried = self._num_since_alone >= _TRIED_AGAIN
        return self._are_short(num_prompt_tokens) and self._credit_s >= alone and (is_gain or is_tried)

    def left_out_decodes(self) -> None:
        """The step that begins now has prompts alone, though there were decodes."""
        self._credit_s -= self._alone.seconds

    def _are_short(self, num_prompt_tokens: int) -> bool:
        """What a step with prompts takes beside their tokens can be told from it, and is felt."""
        return num_prompt_tokens * self._token.seconds <= _SHORT * self._decode.seconds


class _Average:
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
