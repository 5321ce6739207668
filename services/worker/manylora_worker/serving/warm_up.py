"""What a new worker loads before it takes requests: the adapters that the cluster uses most, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store, StoreUnavailable
from manylora_shared.coordination.records import HotAdaptersRecord
from manylora_shared.ids import AdapterUid, TenantId, is_uid, owner_of
from manylora_shared.telemetry.logs import fields

from manylora_worker.hosting.runtime import Runtime

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.02


async def warm_up(store: Store, runtime: Runtime, is_served: Callable[[AdapterUid], bool], limit_s: float) -> int:
    """Returns how many were loaded, or could not be, in time. is_served: whether an adapter is registered still."""
    try:
        stored = await store.get(keys.HOT_ADAPTERS)
        adapters = () if stored is None else HotAdaptersRecord.stored(stored).adapters
    except (StoreUnavailable, ValueError) as e:
        _LOG.warning("the worker starts cold", extra=fields(error=str(e)))
        return 0
    loop = asyncio.get_running_loop()
    began, before, asked = loop.time(), runtime.view.stats.prefetches_ended, 0
    for hot in adapters:
        uid = AdapterUid(hot.uid)
        if is_uid(uid) and owner_of(uid) in (None, hot.tenant_id) and is_served(uid):
            runtime.prefetch(uid, TenantId(hot.tenant_id))
            asked += 1
    ended = 0
    while ended < asked and loop.time() < began + limit_s and runtime.view.failure is None:
        await asyncio.sleep(_LOOK_S)
        ended = runtime.view.stats.prefetches_ended - before
    if asked:
        _LOG.info("warmed up", extra=fields(adapters=f"{ended} of {asked}", seconds=round(loop.time() - began, 2)))
    return ended
