"""How many KV blocks of the device a request has held, and for how long. BlockTables writes it."""

from __future__ import annotations

from collections.abc import Iterable


class Holding:
    """A block that choices of the request share counts once; one that other requests have too counts for each."""

    __slots__ = ("_block_seconds", "_counts", "_num_held", "_since")

    def __init__(self, *, is_shared: bool) -> None:
        """is_shared: there are several choices."""
        self._block_seconds = 0.0
        self._num_held = 0
        self._since = 0.0
        self._counts: dict[int, int] | None = {} if is_shared else None

    @property
    def num_held(self) -> int:
        return self._num_held

    def block_seconds(self, now: float) -> float:
        return self._block_seconds + self._num_held * max(0.0, now - self._since)

    def take(self, block_ids: Iterable[int], count: int, now: float) -> None:
        """count: how many they are."""
        self._pass(now)
        counts = self._counts
        if counts is None:
            self._num_held += count
            return
        for block_id in block_ids:
            counts[block_id] = counts.get(block_id, 0) + 1
        self._num_held = len(counts)

    def give(self, block_ids: Iterable[int], count: int, now: float) -> None:
        self._pass(now)
        counts = self._counts
        if counts is None:
            self._num_held -= count
            return
        for block_id in block_ids:
            counts[block_id] -= 1
            if not counts[block_id]:
                del counts[block_id]
        self._num_held = len(counts)

    def _pass(self, now: float) -> None:
        if now > self._since:
            self._block_seconds += self._num_held * (now - self._since)
            self._since = now
