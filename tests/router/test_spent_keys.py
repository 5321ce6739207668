"""Keys that outlive their answers."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.front import spent_keys
from manylora_router.front.spent_keys import SpentKeys
from manylora_sim import loop


def test_each_stands_for_its_time_and_the_oldest_past_the_bound_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_keys, "TENANT_KEYS", 2)

    async def main() -> None:
        released: list[tuple[str, str, int]] = []
        kept = SpentKeys(lambda *told: released.append(told))
        now = asyncio.get_running_loop().time()
        for i, slot in enumerate("abc"):
            kept.add("acme", slot, slot.encode(), i, now + 10.0 + i)
        kept.add("other", "a", b"x", 7, now + 20.0)
        assert released == [("acme", "a", 0)]
        assert kept.fingerprint_of("acme", "a") is None
        assert (kept.fingerprint_of("acme", "b"), kept.fingerprint_of("other", "a")) == (b"b", b"x")
        kept.taken("acme", "c")
        await asyncio.sleep(11.5)
        assert released[1:] == [("acme", "b", 1)]
        await asyncio.sleep(5.0)
        assert len(kept) == 1, "what was taken is not released"
        kept.close()
        await asyncio.sleep(50.0)
        assert len(released) == 2

    loop.run(main(), seed=0)
