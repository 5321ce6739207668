"""Who may have how many calls under way at a server, and how fast they may come.

An account (a tenant, a peer) that holds many may hold as many as are free beside what is kept: the dynamic threshold of
Choudhury and Hahne (1998), by which nobody fills what all share. What is kept is for those that hold few, by the same
rule: after n of them that came once all else was taken, the next has about few * (1 - few / kept)^n of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from manylora_shared.errors import Overloaded

FEW = 16  # calls that are an account's for certain while no more than what is kept is taken
REFUSALS_PER_S = 256.0
BURST_S = 1.0  # of its rate, that an account has saved at most
LONGEST_WAIT_S = 60.0
MAX_WAITING = 20_480  # for one pace, of all accounts
_KEPT_WAITING = 1_024
_MAX_ACCOUNTS = 1_024


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


class Pace:
    """How much accounts may do in a second, and what they have saved: token buckets. Belongs to one event loop."""

    def __init__(self, per_s: float, told: str, *, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        """told: to who would have to wait for longer."""
        self._per_s = per_s
        self._told = told
        self._longest_wait_s = longest_wait_s
        self._waiting = Places(MAX_WAITING, kept=_KEPT_WAITING)
        self._due_at: dict[str, float] = {}

    async def wait(self, account: str, cost: float = 1.0) -> None:
        """Raises Overloaded instead, also where too many wait already."""
        now = asyncio.get_running_loop().time()
        if len(self._due_at) > _MAX_ACCOUNTS:
            self._due_at = {each: at for each, at in self._due_at.items() if at > now - BURST_S}
        at = max(self._due_at.get(account, 0.0), now - BURST_S)
        if at > now + self._longest_wait_s:
            raise Overloaded(self._told, retry_after_s=at - now)
        due_at = at + cost / self._per_s
        if at <= now:
            self._due_at[account] = due_at
            return
        with self._waiting.held(account):
            self._due_at[account] = due_at
            await asyncio.sleep(at - now)


# Whoever asks again as soon as it is refused would cost a server all that its refusals take.
class Refusals:
    """When a call that may not come in is told so."""

    def __init__(self) -> None:
        self._pace = Pace(REFUSALS_PER_S, "is refused at once")

    async def due(self, account: str) -> None:
        """Returns at once where too many wait already."""
        with suppress(Overloaded):
            await self._pace.wait(account)
