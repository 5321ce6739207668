"""Connections to workers."""

from __future__ import annotations

import asyncio

from manylora_shared.coordination import keys
from router_fakes import (
    RouterCluster,
    simulate,
    text_request,
)


def test_channels_follow_the_workers() -> None:
    async def test(cluster: RouterCluster) -> None:
        await asyncio.gather(*(cluster.ask(text_request()) for _ in range(4)))
        assert cluster.app.debug_counters()["channels"] == 2
        await cluster.store.delete(keys.worker("worker-1"))
        await asyncio.sleep(0.1)
        assert cluster.app.debug_counters()["channels"] == 1

    simulate(test)
