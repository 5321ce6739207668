"""Prompts from their pieces: words, or token ids that every vocabulary has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from manylora.load.planning.schedule import Piece

_IDS = range(10, 250)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face others level office "
    "door health person art war history party result change morning reason research girl guy moment air teacher "
    "force "
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Words:
    """How a server counts: a prompt of n words has `others + n * tokens_a_word` tokens."""

    tokens_a_word: float = 1.0
    others: float = 0.0

    def text(self, pieces: Sequence[Piece]) -> str:
        """Of about as many tokens; of one word at least."""
        return " ".join(
            _words(piece.seed, max(1, round((piece.tokens - (self.others if piece is pieces[-1] else 0)) / self._each)))
            for piece in pieces
        )

    @property
    def _each(self) -> float:
        return max(self.tokens_a_word, 0.1)


def words_from(short: int, short_tokens: int, long: int, long_tokens: int) -> Words:
    """Of two prompts' words and tokens."""
    each = max(0.1, (long_tokens - short_tokens) / (long - short))
    return Words(each, max(0.0, short_tokens - short * each))


def ids(pieces: Sequence[Piece]) -> list[int]:
    return [token_id for piece in pieces for token_id in _ids(piece.seed, piece.tokens)]


@functools.lru_cache(maxsize=512)
def _words(seed: str, count: int) -> str:
    return " ".join(Random(seed).choices(_WORDS, k=count))


@functools.lru_cache(maxsize=512)
def _ids(seed: str, count: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(_IDS, k=count))
