"""How full the store is, looked at now and then, and said before it takes no more changes. Owns the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

from manylora_shared.coordination.base import Space, Store, StoreUnavailable
from manylora_shared.telemetry import Metrics, Telemetry

_LOG = logging.getLogger(__name__)
LOOK_S = 30.0
_NEAR = 0.8
_MIB = 1 << 20


class SpaceWatch:
    """quota_bytes: of a store that does not tell its own."""

    def __init__(self, store: Store, telemetry: Telemetry, *, quota_bytes: int) -> None:
        self.last: Space | None = None
        self._store = store
        self._telemetry = telemetry
        self._quota_bytes = quota_bytes

    async def run(self) -> None:
        """Ends by cancellation."""
        while True:
            with contextlib.suppress(StoreUnavailable):  # others say that it is away
                space = await self._store.space()
                self._take(dataclasses.replace(space, quota_bytes=space.quota_bytes or self._quota_bytes))
            await asyncio.sleep(LOOK_S)

    def _take(self, space: Space) -> None:
        self.last = space
        self._telemetry.gauge(Metrics.ETCD_USED_PART, space.used_bytes / space.quota_bytes)
        used = f"{space.used_bytes / _MIB:.1f} of {space.quota_bytes / _MIB:.1f} MiB"
        if space.is_full:
            _LOG.error("etcd is full (%s) and takes no changes: compact and defragment it, then disarm its alarm", used)
        elif space.used_bytes >= _NEAR * space.quota_bytes:
            _LOG.warning("etcd is nearly full (%s): compact and defragment it, or raise its quota", used)
