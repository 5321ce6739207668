"""How many bytes of large messages a tenant's calls may bring in a second, over both fronts. Owns what each used."""

from __future__ import annotations

import asyncio

from manylora_shared.errors import Overloaded

BURST_S = 1.0  # of its rate, that a tenant has saved at most
LONGEST_WAIT_S = 2.0  # whose bytes all lie in memory
_MAX_KEPT = 1_024


class Pace:
    """Belongs to one event loop."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at: dict[str, float] = {}

    async def wait(self, tenant: str, size_bytes: int) -> None:
        """Raises Overloaded instead of waiting for longer than LONGEST_WAIT_S."""
        now = asyncio.get_running_loop().time()
        if len(self._free_at) > _MAX_KEPT:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now - BURST_S}
        at = max(self._free_at.get(tenant, 0.0), now - BURST_S)
        if at > now + LONGEST_WAIT_S:
            told = f"more than {self._bytes_per_s >> 20} MiB a second of messages over 32 KiB"
            raise Overloaded(f"this tenant's calls bring {told}", retry_after_s=at - now)
        self._free_at[tenant] = at + size_bytes / self._bytes_per_s
        if at > now:
            await asyncio.sleep(at - now)
