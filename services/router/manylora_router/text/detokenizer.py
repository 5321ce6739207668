"""From token ids to text, as they come, never showing half a character. Knows a tokenizer by its `decode` alone."""

# tokenizers' DecodeStream does not do: tokens that are no UTF-8, which a logit bias forces, make it raise or hold back
# what follows at a growing cost, and a character that is cut at the end is lost.

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that no later token changes."""

    def finish(self) -> str:
        """An incomplete character becomes U+FFFD."""


_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8  # a character is at most four single-byte tokens; a U+FFFD that outlives this many is meant
_MAX_SILENT_TOKENS = 64  # of a beginning without text, which may have a space that the decoder strips there alone
_MAX_CONTEXT_TRIES = 16
_MAX_PREFIX_TOKENS = 32


class WindowDetokenizer:
    # New text is what a short window decodes to, less what it does without the new tokens. The window begins at
    # the last tokens that gave text: both start alike for a decoder that strips leading spaces.

    __slots__ = ("_decode", "_held", "_prefix", "_prefix_text")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        """The text continues the prompt's: both together are what all tokens decode to."""
        self._decode = decode
        self._prefix = _last_context(decode, prompt_token_ids)
        self._prefix_text = decode(self._prefix) if self._prefix else ""
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
        limit = _MAX_HELD_TOKENS if text else _MAX_SILENT_TOKENS
        return self._take(text) if self._is_certain(text) or len(self._held) >= limit else ""

    def _is_certain(self, text: str) -> bool:
        return not text.endswith(_REPLACEMENT) and len(text) > self._num_known(text)

    def _completes_prefix(self, text: str) -> bool:
        """A character whose first bytes are a prompt's last tokens."""
        return self._prefix_text.endswith(_REPLACEMENT) and not text.startswith(self._prefix_text)

    def _num_known(self, text: str) -> int:
        known = self._prefix_text
        if not self._completes_prefix(text):
            return len(known)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, known, strict=False)))

    def _take(self, text: str) -> str:
        new = text[self._num_known(text) :]
        if new:
            tokens = self._prefix + self._held if self._completes_prefix(text) else self._held
            self._prefix = tokens[-_MAX_PREFIX_TOKENS:]
            self._prefix_text = self._decode(self._prefix)
        self._held = []  # tokens without text (special ones) leave no trace
        return new


def _last_context(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[int]:
    """The fewest last tokens with text that begins with a whole character: what a decoder strips or joins is theirs."""
    count, num_tries = 1, 0
    while count < len(token_ids) and num_tries < _MAX_CONTEXT_TRIES:
        text = decode(token_ids[-count:])
        whole = text.rstrip(_REPLACEMENT)
        if whole and _REPLACEMENT not in whole:
            break
        count += 1 if text else count  # special tokens have none
        num_tries += 1
    return list(token_ids[-count:])
