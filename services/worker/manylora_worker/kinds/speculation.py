"""Guesses of a sequence's next tokens by prompt lookup (Saxena 2023): what followed its last tokens where they stood
before, in the prompt or in the answer. Pure.

A step computes the guesses behind the last token and draws at each of them. A guess counts as far as it is what was
drawn, and a draw is a function of seed and position: so no answer is another for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manylora_worker.kinds.guessing import MOST_GUESSES

_MATCHED = 3  # last tokens that have to have stood before
_REMEMBERED = 4096  # places: the latest
FIRST_GUESSES = 4  # of a step
_WORTH = 0.6  # share of right guesses from which a step waits for its draw, where the next could go ahead of it
_PATIENCE = 16  # guesses that the share is over, the later the more


class Speculation:
    """Told each token in order. It guesses in secret as well: only what has been right of late is worth a step."""

    __slots__ = ("_places", "_source", "_tokens", "rate")

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens: list[int] = []
        # by the last tokens: the place behind them where they stood last
        self._places: dict[tuple[int, ...], int] = {}
        self._source: int | None = None  # the place of the next token's guess
        self.rate = 0.0  # of its guesses in secret, those that were right of late
        for token_id in token_ids:
            self._tokens.append(token_id)
            self._remember()
        self.rate = _WORTH / 2  # how the prompt repeats itself says little of the answer

    @property
    def is_worth_it(self) -> bool:
        return self._source is not None and self.rate >= _WORTH

    def tell(self, token_id: int) -> None:
        source = self._source
        if source is not None:
            is_right = self._tokens[source] == token_id
            self.rate += (is_right - self.rate) / _PATIENCE * 2
            self._source = source + 1 if is_right else None
        self._tokens.append(token_id)
        self._remember()

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

    def _remember(self) -> None:
        tokens = self._tokens
        if len(tokens) < _MATCHED:
            return
        last, places = tuple(tokens[-_MATCHED:]), self._places
        found = places.pop(last, None)
        if self._source is None:
            self._source = found
        places[last] = len(tokens)
        if len(places) > _REMEMBERED:
            del places[next(iter(places))]
