"""Stop strings: the first one in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.depth = depth
        self.match: str | None = None  # the longest that ends here


class StopStrings:
    """One automaton (Aho and Corasick 1975). Immutable; shared by a request's choices."""

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
    # the longest suffix of the text that begins some stop string
    while True:
        following = node.children.get(character)
        if following is not None:
            return following
        if node.depth == 0:
            return node
        node = node.fallback


class StopStringMatcher:
    """The match that is complete first wins; of several at the same character, the longest."""

    __slots__ = ("_held", "_node", "_root", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._root = self._node = stops.root
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """The text that is certainly before any match. may_match: one may end here."""
        assert self.matched is None
        node = self._node
        for index, character in enumerate(text):
            node = step(node, character)
            if may_match and node.match is not None:
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
        held, self._held = self._held, ""
        return held
