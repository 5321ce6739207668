"""What a worker says of itself, as plain data; meaning as in worker.proto. Owns nothing."""

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
    """A request for it was granted, or a prefetch was sent, and the worker has not reported it yet."""
    HOST = 2
    DEVICE = 3


ABSENT = Residency.ABSENT
"""At hand: asking an enum for a member takes longer than a call."""


class StartedRequest(NamedTuple):
    request_id: RequestId
    flow: FlowKey
    sequences: int


class FlowTokens(NamedTuple):
    """Cumulative since the worker's start."""

    prompt_tokens: int
    output_tokens: int


class FlowLoad(NamedTuple):
    """A flow's unfinished sequences on a worker."""

    slotted: int
    ready: int
    """Without a slot, and others are why."""
    held: int
    """Without a slot and unable to use one, by their own tenant's doing (worker.proto)."""

    @property
    def unheld(self) -> int:
        return self.slotted + self.ready


NO_LOAD = FlowLoad(0, 0, 0)


@dataclass(slots=True)
class WorkerReport:
    """One report of a worker. Meaning as in worker.proto. Never changed; not frozen, which would double the time that
    making one takes."""

    snapshot: bool
    sequence_slots: int
    running_sequences: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int
    draining: bool = False
    adapters: Mapping[AdapterUid, Residency] = field(default_factory=dict)
    """HOST, DEVICE or ABSENT, of the adapters that changed; in a snapshot of all that are resident."""
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[RequestId, ...] = ()
    flows: Mapping[FlowKey, FlowTokens] = field(default_factory=dict)
    max_sequences: int = 0
    loads: Mapping[FlowKey, FlowLoad] = field(default_factory=dict)
    """Of the flows that changed; in a snapshot of all that have some."""
    tenants: Mapping[TenantId, int] = field(default_factory=dict)
    """KV blocks of tenants where they changed."""
