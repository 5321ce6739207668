"""Which tokens a sequence may not draw next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from manylora_worker.kinds.api import ANY_TOKEN, EngineRequest

Bars = tuple[tuple[int, int], ...]


# A bar is (token, before): the token may not follow `before`, which is the pending one, or ANY_TOKEN.
class RequestBars:
    def __init__(self, request: EngineRequest) -> None:
        self._min_tokens = request.sampling.min_tokens
        self._stops: Bars = tuple((token_id, ANY_TOKEN) for token_id in request.stop_token_ids)
        words = request.bad_sequences
        singles: Bars = tuple((word[0], ANY_TOKEN) for word in words if len(word) == 1)
        pairs: Bars = tuple((word[1], word[0]) for word in words if len(word) == 2)
        self._always = (singles, singles + pairs)  # by the number of pending tokens, as the next
        # by the last output token that is known when the word's last token may be drawn
        self._words: tuple[dict[int, list[tuple[int, ...]]], ...] = (defaultdict(list), defaultdict(list))
        for num_pending, by_known in enumerate(self._words):
            for word in words:
                if len(word) >= 2 + num_pending:
                    by_known[word[-2 - num_pending]].append(word)

    @classmethod
    def of(cls, request: EngineRequest) -> RequestBars | None:
        """None: nothing is ever barred."""
        return cls(request) if request.sampling.min_tokens or request.bad_sequences else None

    def after(self, output_token_ids: Sequence[int], num_pending: int) -> Bars:
        """Of the next draw. output_token_ids: those that are known; num_pending: 0 or 1 more."""
        bars = self._always[num_pending]
        if len(output_token_ids) + num_pending < self._min_tokens:
            bars = self._stops + bars
        if not output_token_ids:
            return bars
        candidates = self._words[num_pending].get(output_token_ids[-1], ())
        return bars + tuple(
            (word[-1], word[-2] if num_pending else ANY_TOKEN)
            for word in candidates
            if _ends_with(output_token_ids, word[: -1 - num_pending])
        )


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(end) :]) == end
