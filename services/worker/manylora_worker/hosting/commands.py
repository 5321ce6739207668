"""What the event loop may ask of the engine, each done between two steps by whoever turns it.

A command can be pickled: the engine may be in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.core import EngineCore
from manylora_worker.kinds.api import EngineRequest
from manylora_worker.memory.tenant_shares import TenantShare

Command = Callable[[EngineCore, float], None]
"""Done between two steps, with the time."""


def add(request: EngineRequest) -> Command:
    return partial(_add, request)


def abort(request_id: RequestId) -> Command:
    return partial(_abort, request_id)


def stop_choice(request_id: RequestId, choice: int) -> Command:
    return partial(_stop_choice, request_id, choice)


def prefetch(adapter_uid: AdapterUid, tenant_id: TenantId | None) -> Command:
    return partial(_prefetch, adapter_uid, tenant_id)


def set_pins(pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> Command:
    return partial(_set_pins, pins, largest_bytes)


def set_share(tenant_id: TenantId, share: TenantShare | None) -> Command:
    return partial(_set_share, tenant_id, share)


def set_public_prefixes(prefixes: Mapping[str, Sequence[int]]) -> Command:
    return partial(_set_public_prefixes, prefixes)


def pause(request_id: RequestId) -> Command:
    return partial(_pause, request_id)


def resume(request_id: RequestId) -> Command:
    return partial(_resume, request_id)


def _add(request: EngineRequest, core: EngineCore, now: float) -> None:
    core.add(request, now)


def _abort(request_id: RequestId, core: EngineCore, now: float) -> None:
    core.abort(request_id, now)


def _stop_choice(request_id: RequestId, choice: int, core: EngineCore, now: float) -> None:
    core.stop_choice(request_id, choice, now)


def _prefetch(adapter_uid: AdapterUid, tenant_id: TenantId | None, core: EngineCore, now: float) -> None:
    core.prefetch(adapter_uid, tenant_id)


def _set_pins(pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int, core: EngineCore, now: float) -> None:
    core.set_pins(pins, largest_bytes)


def _set_share(tenant_id: TenantId, share: TenantShare | None, core: EngineCore, now: float) -> None:
    core.set_share(tenant_id, share)


def _set_public_prefixes(prefixes: Mapping[str, Sequence[int]], core: EngineCore, now: float) -> None:
    core.set_public_prefixes(prefixes, now)


def _pause(request_id: RequestId, core: EngineCore, now: float) -> None:
    core.pause(request_id)


def _resume(request_id: RequestId, core: EngineCore, now: float) -> None:
    core.resume(request_id)
