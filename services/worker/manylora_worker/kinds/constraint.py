"""What keeps the tokens of a choice inside its constraint, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Of one choice. Called by the engine's thread; the mask is made beside it."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Those drawn next, maybe none; then the mask of the next draw is made."""

    def is_done(self, *, waits: bool) -> bool:
        """Whether that is over. waits: for a moment, where it is not."""

    @property
    def is_over(self) -> bool:
        """The text is whole and nothing can follow."""

    @property
    def error(self) -> str:
        """Why there is no mask; empty: there is one."""

    @property
    def mask(self) -> bytes:
        """A bit for each token of the vocabulary, the lowest of the first byte first: it may be drawn."""


class CompiledConstraint(Protocol):
    @property
    def end_token_ids(self) -> Sequence[int]:
        """One of them may be drawn where the text may end, and ends it."""

    def matcher(self) -> Matcher:
        """For a choice without a token."""


def barred(mask: bytes, bars: Sequence[tuple[int, int]]) -> bytes:
    """Without their tokens, unless the constraint allows no others: it goes before them. No token is pending."""
    if not bars:
        return mask
    allowed = bytearray(mask)
    for token_id, _ in bars:
        allowed[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(allowed) if any(allowed) else mask
