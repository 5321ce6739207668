"""What an answer's text is made of, and the two ends of a parser: the text that has come, and the pieces that are sure.

A grammar is a generator that yields where it needs more text. It decides by no more than it has, so the pieces of a
text are the same however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    name: str
    source: str  # the answer's text up to the arguments, from which the call was read


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Of the call that began last: a part of a JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call that began last is whole: its arguments are a JSON object."""


Piece = Text | Reasoning | CallBegin | CallArguments | CallEnd
Waiting = Generator[None, None, bool]


class Stream:
    """The text that nothing was made of yet."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def reaches(self, position: int) -> Waiting:
        """Whether there is a character at `position`; waits until that is sure."""
        while len(self.text) <= position:
            if self.is_over:
                return False
            yield
        return True

    def after_space(self, position: int) -> Generator[None, None, int]:
        """Where the next character is that is no white space; the text's length where the text is over."""
        while (yield from self.reaches(position)) and self.text[position].isspace():
            position += 1
        return position

    def has(self, marker: str, position: int = 0) -> Waiting:
        while True:
            found = self.text[position : position + len(marker)]
            if found == marker:
                return True
            if self.is_over or not marker.startswith(found):
                return False
            yield


class Output:
    """Gathers pieces. White space is held back until it is sure that no call or end of reasoning follows it."""

    def __init__(self, most_calls: int | None = None) -> None:
        """`most_calls`: those after them are left out."""
        self._pieces: list[Piece] = []
        self._space = ""
        self._most_calls = most_calls
        self._num_begun = 0
        self._is_after_call = False
        self.num_whole_calls = 0

    def drain(self) -> list[Piece]:
        drained, self._pieces = self._pieces, []
        return drained

    def text(self, text: str) -> None:
        if shown := self._without_space(text):
            self._is_after_call = False
            self._pieces.append(Text(shown))

    def reasoning(self, text: str) -> None:
        if shown := self._without_space(text):
            self._pieces.append(Reasoning(shown))

    def begin(self, name: str, source: str) -> None:
        self._num_begun += 1
        self._add(CallBegin(name, self._space + source))
        self._space = ""

    def arguments(self, text: str) -> None:
        if text:
            self._add(CallArguments(text))

    def end(self) -> None:
        self._add(CallEnd())
        self._is_after_call = True
        self.num_whole_calls += 1

    def call(self, name: str, arguments: str, source: str) -> None:
        self.begin(name, source)
        self.arguments(arguments)
        self.end()

    def drop_space(self) -> None:
        self._space = ""

    def finish(self) -> None:
        if self._space and not self._is_after_call:
            self._pieces.append(Text(self._space))
        self._space = ""

    def _add(self, piece: Piece) -> None:
        if self._most_calls is None or self._num_begun <= self._most_calls:
            self._pieces.append(piece)

    def _without_space(self, text: str) -> str:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


def until(stream: Stream, give: Callable[[str], None], *markers: str) -> Waiting:
    """Gives the text before the first of `markers`, which then begins the stream; False: there is none, and the text
    is over.
    """
    while True:
        found = min((at for marker in markers if (at := stream.text.find(marker)) >= 0), default=-1)
        if found >= 0:
            give(stream.take(found))
            return True
        begun = 0 if stream.is_over else max(_begun(stream.text, marker) for marker in markers)
        give(stream.take(len(stream.text) - begun))
        if stream.is_over:
            return False
        yield


def all_text(stream: Stream, out: Output) -> Generator[None]:
    while True:
        out.text(stream.take(len(stream.text)))
        if stream.is_over:
            return
        yield


def _begun(text: str, marker: str) -> int:
    """How many last characters may begin the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
