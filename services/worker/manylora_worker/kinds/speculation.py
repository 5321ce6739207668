"""Guesses of a sequence's next tokens by prompt lookup (Saxena 2023): what followed its last tokens where they stood
before, in the prompt or in the answer. Pure.

A step computes the guesses behind the last token and draws at each of them. A guess counts as far as it is what was
drawn, and a draw is a function of seed and position: so no answer is another for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora_worker.kinds.guessing import MOST_GUESSES

_MATCHED = 3  # last tokens that have to have stood before
_REMEMBERED = 4096  # places: the latest
MOST_TOKENS = _REMEMBERED + _MATCHED  # that it is begun with: what stands before them is never found
MOST_READ = 512  # tokens at a time: all sequences of a step read on the engine's thread
FIRST_GUESSES = 4  # of a step
_WORTH = 0.6  # share of right guesses from which a step waits for its draw, where the next could go ahead of it
_PATIENCE = 16  # guesses that the share is over, the later the more


class Speculation:
    """Told each token in order. It guesses in secret as well: only what has been right of late is worth a step."""

    # It reads a long prompt in parts, and guesses when it is through.

    __slots__ = ("_num_read", "_places", "_source", "_tokens", "rate")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = list(token_ids[-MOST_TOKENS:])
        self._num_read = 0  # of the tokens: their places are known
        # by the last tokens: the place behind them where they stood last
        self._places: dict[tuple[int, ...], int] = {}
        self._source: int | None = None  # the place of the next token's guess
        # of its guesses in secret, those that were right of late; how the prompt repeats itself says little of that
        self.rate = _WORTH / 2
        self.read_on()

    @property
    def is_worth_it(self) -> bool:
        return self._source is not None and self.rate >= _WORTH

    def tell(self, token_id: int) -> None:
        source = self._source
        if source is not None:
            is_right = self._tokens[source] == token_id
            self.rate += (is_right - self.rate) / _PATIENCE * 2
            self._source = source + 1 if is_right else None
        is_through = self._num_read == len(self._tokens)
        self._tokens.append(token_id)
        if is_through:
            self.read_on()

    def read_on(self) -> int:
        """Once a step. Returns how many tokens it read."""
        tokens, places, start = self._tokens, self._places, self._num_read
        end = self._num_read = min(len(tokens), start + MOST_READ)
        found = None
        for place in range(max(start + 1, _MATCHED), end + 1):
            last = tuple(tokens[place - _MATCHED : place])
            found = places.pop(last, None)
            places[last] = place
            if len(places) > _REMEMBERED:
                del places[next(iter(places))]
        if self._source is None and end == len(tokens):  # an earlier place's guess is not of the next token
            self._source = found
        return end - start

    def guess(self, most: int) -> Sequence[int]:
        """None where it is not worth it."""
        if not self.is_worth_it or most < 1:
            return ()
        source, most = self._source, min(most, MOST_GUESSES)
        assert source is not None
        found = self._tokens[source : source + most]
        while len(found) < most:  # it repeats what it is in the middle of
            found += found[: most - len(found)]
        return found
