"""What the event loop may ask of the engine, each done between two steps by whoever turns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.api import EngineRequest
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.tenant_shares import TenantShare

Command = Callable[[EngineCore, float], None]
"""Done between two steps, with the time."""


def add(request: EngineRequest) -> Command:
    return lambda core, now: core.add(request, now)


def abort(request_id: RequestId) -> Command:
    return lambda core, now: core.abort(request_id, now)


def stop_choice(request_id: RequestId, choice: int) -> Command:
    return lambda core, now: core.stop_choice(request_id, choice, now)


def prefetch(adapter_uid: AdapterUid, tenant_id: TenantId | None) -> Command:
    return lambda core, now: core.prefetch(adapter_uid, tenant_id)


def set_pins(pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> Command:
    return lambda core, now: core.set_pins(pins, largest_bytes)


def set_share(tenant_id: TenantId, share: TenantShare | None) -> Command:
    return lambda core, now: core.set_share(tenant_id, share)


def pause(request_id: RequestId) -> Command:
    return lambda core, now: core.pause(request_id)


def resume(request_id: RequestId) -> Command:
    return lambda core, now: core.resume(request_id)
