"""Who may have how many calls under way at a server. Pure.

An account (a tenant, a peer) that holds many may hold as many as are free beside what is kept: the dynamic threshold of
Choudhury and Hahne (1998), by which nobody fills what all share. What is kept is for those that hold few, by the same
rule: after n of them that came once all else was taken, the next has about few * (1 - few / kept)^n of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manylora_shared.errors import Overloaded

FEW = 16  # calls that are an account's for certain while no more than what is kept is taken


class Places:
    def __init__(self, capacity: int, *, kept: int, few: int = FEW) -> None:
        """kept: places for those that hold at most `few`."""
        self._num_free = capacity
        self._few = few
        self._kept = kept
        self._held: dict[str, int] = {}

    @property
    def num_held(self) -> int:
        return sum(self._held.values())

    def enter(self, account: str) -> None:
        """Raises Overloaded. Who entered leaves."""
        held = self._held.get(account, 0)
        fits = self._num_free - self._kept > held
        if not fits and held < self._few:
            fits = self._num_free * self._few > held * self._kept
        if not fits:
            raise Overloaded(
                f"{held} calls of {account} are under way here; no more fit beside the others", retry_after_s=1.0
            )
        self._num_free -= 1
        self._held[account] = held + 1

    def leave(self, account: str) -> None:
        self._num_free += 1
        left = self._held[account] - 1
        if left:
            self._held[account] = left
        else:
            del self._held[account]

    @contextmanager
    def held(self, account: str) -> Iterator[None]:
        self.enter(account)
        try:
            yield
        finally:
            self.leave(account)
