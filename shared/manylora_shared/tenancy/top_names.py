"""Whose names stand in metrics: those that are used most. Owns what each used lately."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

RANK_S = 60.0
_FORGET_BELOW = 0.5
_CLEARLY = 2.0  # so many times as much as the one whose place it takes
_MAX_MOVES = 8  # in one ranking: each ends a name's series and begins another's
_MAX_KNOWN = 50_000


class TopNames(Generic[Name]):
    """At most `size` have a name at a time. `now`: seconds that never fall."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._use: dict[Name, float] = {}  # halved at every ranking
        self._named: set[Name] = set()
        self._ranked_at: float | None = None

    def __len__(self) -> int:
        return len(self._named)

    def used(self, name: Name, amount: float) -> bool:
        """Whether it is named."""
        if name in self._use or len(self._use) < _MAX_KNOWN:
            self._use[name] = self._use.get(name, 0.0) + amount
            if name not in self._named and len(self._named) < self._size:
                self._named.add(name)
        return name in self._named

    def is_named(self, name: Name) -> bool:
        return name in self._named

    def rank(self, now: float) -> list[Name]:
        """Those that lose their name, once a RANK_S at most."""
        if self._ranked_at is not None and now - self._ranked_at < RANK_S:
            return []
        is_first, self._ranked_at = self._ranked_at is None, now
        if is_first:
            return []
        lost = self._exchanged()
        self._use = {
            name: use / 2 for name, use in self._use.items() if use / 2 >= _FORGET_BELOW or name in self._named
        }
        return lost

    def _exchanged(self) -> list[Name]:
        outside = sorted((n for n in self._use if n not in self._named), key=self._use.__getitem__, reverse=True)
        inside = sorted(self._named, key=lambda name: self._use.get(name, 0.0))
        lost: list[Name] = []
        for new, old in zip(outside[:_MAX_MOVES], inside, strict=False):
            if self._use[new] <= _CLEARLY * self._use.get(old, 0.0):
                break
            self._named.remove(old)
            self._named.add(new)
            lost.append(old)
        return lost
