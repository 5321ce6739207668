"""Idempotency keys whose work is done, and whose answers had to make room: they are not done again for their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from manylora_shared.errors import AnswerLost

TENANT_KEYS = 2_048  # past that the oldest is free again


@dataclass(frozen=True)
class SpentKey:
    fingerprint: bytes
    revision: int  # of its record in the store
    timer: asyncio.TimerHandle


class SpentKeys:
    def __init__(self, release: Callable[[str, str, int], object]) -> None:
        """release: the record of a tenant's slot, at its revision."""
        self._release = release
        self._keys: dict[str, dict[str, SpentKey]] = {}  # by tenant and slot, the oldest first

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, tenant: str, slot: str, fingerprint: bytes, revision: int, until: float) -> None:
        """`until`: of the event loop's clock."""
        timer = asyncio.get_running_loop().call_at(until, self._expire, tenant, slot)
        mine = self._keys.setdefault(tenant, {})
        mine[slot] = SpentKey(fingerprint, revision, timer)
        if len(mine) > TENANT_KEYS:
            self._expire(tenant, next(iter(mine)))

    def fingerprint_of(self, tenant: str, slot: str) -> bytes | None:
        """None: it is not spent."""
        spent = self._keys.get(tenant, {}).get(slot)
        return spent.fingerprint if spent is not None else None

    def taken(self, tenant: str, slot: str) -> None:
        """Its record is another answer's now."""
        mine = self._keys.get(tenant, {})
        if (spent := mine.pop(slot, None)) is not None:
            spent.timer.cancel()
        if not mine:
            self._keys.pop(tenant, None)

    def close(self) -> None:
        """Their records stay."""
        for mine in self._keys.values():
            for spent in mine.values():
                spent.timer.cancel()
        self._keys.clear()

    def _expire(self, tenant: str, slot: str) -> None:
        revision = self._keys[tenant][slot].revision
        self.taken(tenant, slot)
        self._release(tenant, slot, revision)


def spent() -> AnswerLost:
    return AnswerLost(
        "idempotency-key: its work is done, and its answer is not kept any more; another key does it again"
    )
