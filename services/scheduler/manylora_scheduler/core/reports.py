"""What a worker says of itself, as plain data; meaning as in worker.proto."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_scheduler.core.request import FlowKey


class Residency(enum.IntEnum):
    """Where an adapter's weights are on a worker, nearest last."""

    ABSENT = 0
    ARRIVING = 1  # granted or prefetched, and not reported yet
    HOST = 2
    DEVICE = 3


ABSENT = Residency.ABSENT


class StartedRequest(NamedTuple):
    request_id: RequestId
    flow: FlowKey
    sequences: int


class FlowTokens(NamedTuple):
    # cumulative since the worker's start
    prompt_tokens: int
    output_tokens: int


class FlowLoad(NamedTuple):
    # unfinished sequences
    slotted: int
    ready: int  # without a slot, and others are why
    held: int  # without a slot, by their own tenant's doing

    @property
    def unheld(self) -> int:
        return self.slotted + self.ready


class Owner(NamedTuple):
    """Whose requests a dedicated worker takes: one tenant's with one adapter, which is in its base weights."""

    adapter_uid: AdapterUid
    tenant_id: TenantId


class ToldOwner(NamedTuple):
    """A worker's word. owner: None: it is everybody's. problem: why it is not as it was told to be."""

    owner: Owner | None
    is_ready: bool  # it takes requests
    problem: str = ""


TO_EVERYBODY = ToldOwner(None, True)
NO_LOAD = FlowLoad(0, 0, 0)


@dataclass(slots=True)
class WorkerReport:
    # Never changed; not frozen, which would double what making it costs.
    snapshot: bool
    sequence_slots: int
    running_sequences: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int
    draining: bool = False
    # of those that changed; in a snapshot of all that are resident
    adapters: Mapping[AdapterUid, Residency] = field(default_factory=dict)
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[RequestId, ...] = ()
    flows: Mapping[FlowKey, FlowTokens] = field(default_factory=dict)
    max_sequences: int = 0
    # of the flows that changed; in a snapshot of all that have some
    loads: Mapping[FlowKey, FlowLoad] = field(default_factory=dict)
    tenants: Mapping[TenantId, int] = field(default_factory=dict)  # KV blocks of tenants where they changed
    owner: ToldOwner | None = None  # None: unchanged
