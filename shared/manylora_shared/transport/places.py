"""Who may have how many calls under way at a server, and how fast who may not is told so.

An account (a tenant, a peer) that holds many may hold as many as are free beside what is kept: the dynamic threshold of
Choudhury and Hahne (1998), by which nobody fills what all share. What is kept is for those that hold few, by the same
rule: after n of them that came once all else was taken, the next has about few * (1 - few / kept)^n of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from manylora_shared.errors import Overloaded

FEW = 16  # calls that are an account's for certain while no more than what is kept is taken
REFUSALS_PER_S = 256.0
BURST_S = 1.0  # of its rate, that an account has saved at most
LONGEST_WAIT_S = 60.0
MAX_WAITING_REFUSALS = 20_480  # of all accounts
_KEPT_REFUSALS = 1_024
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


# Whoever asks again as soon as it is refused would cost a server all that its refusals take. So those of one account
# that come too fast wait, in its own connection's room for calls.
class Refusals:
    """When a call that may not come in is told so. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting = Places(MAX_WAITING_REFUSALS, kept=_KEPT_REFUSALS)
        self._due_at: dict[str, float] = {}

    async def due(self, account: str) -> None:
        """Returns at once where too many wait already."""
        now = asyncio.get_running_loop().time()
        if len(self._due_at) > _MAX_ACCOUNTS:
            self._due_at = {each: at for each, at in self._due_at.items() if at > now - BURST_S}
        at = max(self._due_at.get(account, 0.0), now - BURST_S)
        if at <= now:
            self._due_at[account] = at + 1 / REFUSALS_PER_S
        elif at <= now + LONGEST_WAIT_S:
            try:
                with self._waiting.held(account):
                    self._due_at[account] = at + 1 / REFUSALS_PER_S
                    await asyncio.sleep(at - now)
            except Overloaded:
                return
