"""How long steps take, and so how many prompt tokens one may have (Sarathi-Serve, Agrawal et al., 2024). Written by
EngineCore, read by StepPlanner.
"""

from __future__ import annotations

_WEIGHT = 1 / 8  # of one step
_FIRST = 8  # so many steps may be slow once, by a hundred times: memory is set up, kernels are compiled
_MOST = 2.0  # a step counts as so many averages at most: one held up by others says nothing of the next
LEAST_PROMPT_TOKENS = 32  # in each step, however slow
# Of the first prompt, if it has them: of a long prompt in small parts, most of the time is their beginning. Several
# short ones are as quick in several steps, and what decodes waits for less at a time.
LEAST_CHUNK_TOKENS = 64


class StepTime:
    def __init__(self) -> None:
        self._decode = Average()  # of a step without prompts
        self._token = Average()  # what a prompt token adds

    def measured(self, num_prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            self._decode.take(seconds)
            return
        if seconds < self._decode.seconds:
            self._decode.doubt()
        self._token.take(max(0.0, seconds - self._decode.seconds) / num_prompt_tokens)

    def expected(self, num_prompt_tokens: int) -> float:
        """Seconds of such a step; 0 while none was seen."""
        return self._decode.seconds + num_prompt_tokens * self._token.seconds

    def max_prompt_tokens(self, target_s: float | None) -> int | None:
        """Of a step that should take so long at most; None: any number."""
        if target_s is None or not self._token.seconds:
            return None
        return max(LEAST_PROMPT_TOKENS, int((target_s - self._decode.seconds) / self._token.seconds))


class Average:
    """Among the first ones it falls at once, for nothing makes a step fast once."""

    def __init__(self) -> None:
        self.seconds = 0.0  # 0 while nothing was seen; for reading
        self._num_seen = 0  # up to `_FIRST`

    @property
    def is_young(self) -> bool:
        return self._num_seen < _FIRST

    def take(self, seen: float) -> None:
        """0 among the first ones counts as not seen."""
        if self.is_young:
            if not seen:
                return
            self._num_seen += 1
            if not self.seconds or seen < self.seconds:
                self.seconds = seen
                return
        self.seconds += _WEIGHT * (min(seen, _MOST * self.seconds) - self.seconds)

    def doubt(self) -> None:
        """Forgets a young average."""
        if self.is_young:
            self.seconds = 0.0
