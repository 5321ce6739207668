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
    ARRIVING = 1
    """Granted or prefetched, and not reported yet."""
    HOST = 2
    DEVICE = 3


ABSENT = Residency.ABSENT


class StartedRequest(NamedTuple):
    request_id: RequestId
    flow: FlowKey
    sequences: int


class FlowTokens(NamedTuple):
    """Cumulative since the worker's start."""

    prompt_tokens: int
    output_tokens: int


class FlowLoad(NamedTuple):
    """Unfinished sequences."""

    slotted: int
    ready: int
    """Without a slot, and others are why."""
    held: int
    """Without a slot, by their own tenant's doing."""

    @property
    def unheld(self) -> int:
        return self.slotted + self.ready


NO_LOAD = FlowLoad(0, 0, 0)


@dataclass(slots=True)
class WorkerReport:
    """Never changed; not frozen, which would double what making it costs."""

    snapshot: bool
    sequence_slots: int
    running_sequences: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int
    draining: bool = False
    adapters: Mapping[AdapterUid, Residency] = field(default_factory=dict)
    """Of those that changed; in a snapshot of all that are resident."""
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[RequestId, ...] = ()
    flows: Mapping[FlowKey, FlowTokens] = field(default_factory=dict)
    max_sequences: int = 0
    loads: Mapping[FlowKey, FlowLoad] = field(default_factory=dict)
    """Of the flows that changed; in a snapshot of all that have some."""
    tenants: Mapping[TenantId, int] = field(default_factory=dict)
    """KV blocks of tenants where they changed."""
