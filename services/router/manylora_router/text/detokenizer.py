"""From token ids to text, as they come, never showing half a character. Knows a tokenizer by its `decode` alone."""

# tokenizers' DecodeStream does not do: tokens that are no UTF-8, which a logit bias forces, make it raise or hold back
# what follows at a growing cost, and a character that is cut at the end is lost.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that no later token changes."""

    def finish(self) -> str:
        """An incomplete character becomes U+FFFD."""


_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8  # a character is at most four single-byte tokens; a U+FFFD that outlives this many is meant


class WindowDetokenizer:
    # New text is what a short window decodes to, less what it does without the new tokens. The window begins at
    # the last tokens that gave text: both start alike for a decoder that strips leading spaces.

    __slots__ = ("_decode", "_held", "_prefix", "_prefix_text")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) > 1:
            held = [*self._held, *token_ids]
            text = self._decode(self._prefix + held)
            if self._is_certain(text):
                self._held = held
                return self._take(text)
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._take(self._decode(self._prefix + self._held)) if self._held else ""

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._prefix + self._held)
        return self._take(text) if self._is_certain(text) or len(self._held) >= _MAX_HELD_TOKENS else ""

    def _is_certain(self, text: str) -> bool:
        return len(text) > len(self._prefix_text) and not text.endswith(_REPLACEMENT)

    def _take(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        if new:
            self._prefix = self._held
            self._prefix_text = self._decode(self._prefix)
        self._held = []  # tokens without text (special ones) leave no trace
        return new
