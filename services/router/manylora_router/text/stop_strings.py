"""Stop strings: the first one in a text that comes in pieces. Pure.

Nothing is built before a text begins to match: most requests end without it, and a router takes many at a time.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Stop:
    """What of it to go on with where a text has matched some and then does not (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]  # by how much has matched: the longest proper suffix of it that begins `text`

    def after(self, matched: int, character: str) -> int:
        """How much has matched then. matched: below all of it."""
        text = self.text
        while matched and text[matched] != character:
            matched = self.border(matched)
        return matched + 1 if text[matched] == character else 0

    def border(self, matched: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) <= matched:
            length, character = borders[-1], text[len(borders) - 1]
            while length and text[length] != character:
                length = borders[length]
            borders.append(length + 1 if text[length] == character else 0)
        return borders[matched]


class StopStrings:
    """Shared by a request's choices."""

    __slots__ = ("by_first",)

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is not empty"
        self.by_first: dict[str, list[_Stop]] = {}
        for stop in dict.fromkeys(stops):
            self.by_first.setdefault(stop[0], []).append(_Stop(stop))


class StopStringMatcher:
    """The match that is complete first wins; of several at the same character, the longest."""

    __slots__ = ("_begun", "_by_first", "_held", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._by_first = stops.by_first
        self._begun: dict[_Stop, int] = {}  # how much of each the text ends with, where it is some
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """The text that is certainly before any match. may_match: one may end here."""
        assert self.matched is None
        if not self._begun and self._by_first.keys().isdisjoint(text):
            return text
        for index, character in enumerate(text):
            longest = self._step(character)
            if longest is not None and may_match:
                self.matched = longest
                # A longer candidate may be under way: the match begins later in what is held back.
                certain = self._held + text[: index + 1]
                self._held = ""
                return certain[: len(certain) - len(longest)]
        text = self._held + text
        keep = len(text) - max(self._begun.values(), default=0)
        self._held = text[keep:]
        return text[:keep]

    def _step(self, character: str) -> str | None:
        """The longest stop string that ends with it."""
        begun: dict[_Stop, int] = {}
        longest: str | None = None
        for stop, matched in self._begun.items():
            if now := stop.after(matched, character):
                begun[stop] = now
        for stop in self._by_first.get(character, ()):
            begun.setdefault(stop, 1)
        for stop, matched in begun.items():
            if matched == len(stop.text):
                begun[stop] = stop.border(matched)
                if longest is None or matched > len(longest):
                    longest = stop.text
        self._begun = {stop: matched for stop, matched in begun.items() if matched}
        return longest

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
