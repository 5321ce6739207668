"""From token ids to text, as they come: detokenization that never shows half a character, and stop strings.

Owns the text state of one choice of one request. All of it works token by token, so how tokens were grouped into frames
changes nothing: not the text, not the stop string that wins, not the tokens that count as delivered. Work per token is
bounded. The module does not know any tokenizer; text_service.py reads TokenBytes off one, or hands over its decode.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """The text of one token sequence, given out in pieces."""

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token; empty while a character is incomplete."""

    def finish(self) -> str:
        """What was held back: no token comes any more. An incomplete character becomes U+FFFD."""


@dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token stands for.

    Describes tokenizers whose text is the UTF-8 reading of their tokens' bytes in a row: byte-level BPE, and
    sentencepiece with byte fallback.
    """

    pieces: Sequence[bytes]
    """By token id; empty for special tokens. An id beyond the end has no text."""
    strips_first_space: bool = False
    """Whether one space at the very beginning of a text belongs to the encoding and not to the text."""


class BytesDetokenizer:
    """A Detokenizer over TokenBytes; holds at most three bytes back. Bytes that are not UTF-8 become U+FFFD."""

    __slots__ = ("_at_start", "_held", "_pieces")

    def __init__(self, tokens: TokenBytes) -> None:
        self._pieces = tokens.pieces
        self._held = b""
        """The beginning of a character."""
        self._at_start = tokens.strips_first_space

    def push(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:
            return ""
        if not piece:
            return ""
        if self._at_start:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        if self._held:
            piece = self._held + piece
        text, num_bytes = codecs.utf_8_decode(piece, "replace", False)
        self._held = piece[num_bytes:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]


_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""An unfinished character is at most three single-byte tokens; a U+FFFD that outlives this many is meant."""


class WindowDetokenizer:
    """A Detokenizer over any `decode(token_ids) -> text` whose text depends on near neighbours only.

    The new text of a token is what a short window ending in it decodes to, less what the window decodes to without it.
    The window begins at the last tokens that gave text, so that a decoder which treats the first token specially
    (leading spaces) treats both alike.
    """

    __slots__ = ("_decode", "_held", "_prefix", "_prefix_text")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._prefix + self._held)
        grew = len(text) > len(self._prefix_text)
        if (not grew or text.endswith(_REPLACEMENT)) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._prefix + self._held)) if self._held else ""

    def _take(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        if new:
            self._prefix = self._held
            self._prefix_text = self._decode(self._prefix)
        self._held = []  # tokens without text (special ones) leave no trace
        return new


class NoText:
    """The Detokenizer of a router without a tokenizer."""

    __slots__ = ()

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Node:
    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.depth = depth
        self.match: str | None = None
        """The longest stop string that ends here."""


class StopStrings:
    """The stop strings of one request as one automaton (Aho and Corasick 1975). Immutable; shared by its choices."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is not empty"
        self.root = root = _Node(0)
        for stop in stops:
            node = root
            for character in stop:
                node = node.children.setdefault(character, _Node(node.depth + 1))
            node.match = stop
        level = list(root.children.values())
        for node in level:
            node.fallback = root
        while level:
            below: list[_Node] = []
            for node in level:
                for character, child in node.children.items():
                    child.fallback = step(node.fallback, character)
                    child.match = child.match or child.fallback.match
                    below.append(child)
            level = below


def step(node: _Node, character: str) -> _Node:
    """The state after one more character: the longest suffix of the text that begins some stop string."""
    while True:
        following = node.children.get(character)
        if following is not None:
            return following
        if node.depth == 0:
            return node
        node = node.fallback


class StopStringMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The match that is complete first wins; of several complete at the same character, the longest. What comes before the
    match is given out, and until then only what may still become one is held back.
    """

    __slots__ = ("_held", "_node", "_root", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._root = self._node = stops.root
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be before any match. After a match there is no more."""
        assert self.matched is None
        node = self._node
        for index, character in enumerate(text):
            node = step(node, character)
            if node.match is not None:
                self.matched = node.match
                # The automaton is in the longest candidate; the match may begin later in it.
                certain = self._held + text[: index + 1]
                self._held = ""
                return certain[: len(certain) - len(node.match)]
        self._node = node
        text = self._held + text
        keep = len(text) - node.depth
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back: no text comes any more."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)  # not frozen: that would double the time that making one takes
class TextDelta:
    """What new tokens of a choice amount to."""

    text: str
    num_tokens: int
    """How many of the tokens were delivered: all of them, or up to the one that completed a stop string."""
    stop_string: str | None = None


class ChoiceText:
    """The text of one choice. After a stop string, or `finish`, it takes no more tokens."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops) if stops is not None else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        push = self._detokenizer.push
        matcher = self._matcher
        if matcher is None:
            count = len(token_ids)
            # A list is not worth its making for one token, which is what comes while a worker is not busy.
            text = push(token_ids[0]) if count == 1 else "".join([push(token_id) for token_id in token_ids])
            return TextDelta(text, count)
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            text = push(token_id)
            if text:
                pieces.append(matcher.push(text))
                if matcher.matched is not None:
                    return TextDelta("".join(pieces), index + 1, matcher.matched)
        return TextDelta("".join(pieces), len(token_ids))

    def finish(self) -> TextDelta:
        """The rest of the text. It may complete a stop string too."""
        text = self._detokenizer.finish()
        matcher = self._matcher
        if matcher is None:
            return TextDelta(text, 0)
        text = matcher.push(text)
        if matcher.matched is not None:
            return TextDelta(text, 0, matcher.matched)
        return TextDelta(text + matcher.finish(), 0)
