"""What a scheduler is told over one Control stream, and when. Owns what happened since the last report."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manylora.v1 import status_pb2, worker_pb2
from manylora_shared.errors import ManyloraError
from manylora_shared.ids import AdapterUid, RequestId, TenantId, digest_of
from manylora_shared.wire import QOS_NUMBERS

from manylora_worker.adapters.cache import TenantAdapters
from manylora_worker.adapters.pins import PinState
from manylora_worker.engine.counters import FlowTokens, Setbacks
from manylora_worker.hosting.view import EngineView, FlowLoad
from manylora_worker.hosting.waiter import Waiter
from manylora_worker.kinds.api import AdapterTier, EngineRequest
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.serving.dedication import TO_EVERYBODY, Dedicated
from manylora_worker.serving.wire import TIERS, dedication_message

_GATHER_S = 0.002
_STARTED_S = 0.01
_COUNTERS_S = 0.05


@dataclass
class _Changes:
    """A request id that ends and comes again is two reports' matter."""

    started: dict[RequestId, EngineRequest] = field(default_factory=dict)
    ended: dict[RequestId, None] = field(default_factory=dict)


# The first report is a snapshot. A further one goes out
# * at once where requests went, adapters moved, draining began, or one of several flows comes to have nothing ready,
#   but `_GATHER_S` after the last one at the soonest;
# * `_STARTED_S` after requests came: who granted them knows of them;
# * where only counters moved, `_COUNTERS_S` after the last one.
class ControlSession:
    """The stream's handler reads `next_report`, which reads the engine's state from `view` at that moment."""

    def __init__(
        self,
        view: EngineView,
        *,
        sequence_slots: int,
        parked_sequences: int,
        kv_block_bytes: int,
        dedicated: Callable[[], Dedicated] = lambda: TO_EVERYBODY,
    ) -> None:
        self._view = view
        self._dedicated = dedicated
        self._told_dedicated: Dedicated | None = None
        self._kv_block_bytes = kv_block_bytes
        self._sequence_slots = sequence_slots
        self._max_sequences = sequence_slots + parked_sequences
        self._is_draining = False
        self._changes: deque[_Changes] = deque([_Changes()])
        # as last reported, as all up to `_setbacks`; the view never changes one in place
        self._adapters: Mapping[AdapterUid, AdapterTier] | None = None
        self._flows: dict[FlowKey, tuple[FlowTokens, FlowLoad]] = {}
        self._slots = view.slots
        self._served: dict[FlowKey, None] = {}  # without a ready sequence, as of `_slots`
        self._kv_blocks: dict[TenantId, int] = {}
        self._tenant_adapters: Mapping[TenantId, TenantAdapters] = {}
        self._setbacks: dict[TenantId, Setbacks] = {}
        self._due_at: float | None = None  # by the event loop's clock; None: nothing has changed
        self._reported_at = float("-inf")
        self._is_closed = False
        self._error: ManyloraError | None = None
        self._waiter = Waiter()

    def started(self, request: EngineRequest) -> None:
        if request.request_id in self._changes[-1].ended:
            self._changes.append(_Changes())
        self._changes[-1].started[request.request_id] = request
        self._tell_at(asyncio.get_running_loop().time() + _STARTED_S)

    def ended(self, request_id: RequestId) -> None:
        self._changes[-1].ended[request_id] = None
        self._tell_at(self._reported_at + _GATHER_S)

    def engine_changed(self) -> None:
        is_urgent = self._view.adapters is not self._adapters
        if self._view.slots is not self._slots:
            self._slots = self._view.slots
            loads = self._view.loads()
            served = {flow: None for flow, load in loads.items() if not load.ready}
            # To a flow that is alone here nothing is granted beyond the slots.
            is_urgent |= len(loads) > 1 and not served.keys() <= self._served.keys()
            self._served = served
        self._tell_at(self._reported_at + (_GATHER_S if is_urgent else _COUNTERS_S))

    def dedication_changed(self) -> None:
        self._tell_at(self._reported_at + _GATHER_S)

    def draining(self) -> None:
        self._is_draining = True
        self._tell_at(self._reported_at + _GATHER_S)

    def close(self, error: ManyloraError | None) -> None:
        """The first closing counts."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._waiter.wake()

    async def next_report(self) -> worker_pb2.ControlReport | None:
        """When it is due; None at the end. Raises what the session was closed with."""
        loop = asyncio.get_running_loop()
        while not self._is_closed and self._adapters is not None and len(self._changes) == 1:
            if self._due_at is not None and loop.time() >= self._due_at:
                break
            await self._waiter.wait(self._due_at)
        if self._error is not None:
            raise self._error
        if self._is_closed:
            return None
        self._reported_at = loop.time()
        return self._report()

    def _report(self) -> worker_pb2.ControlReport:
        view, stats = self._view, self._view.stats
        is_snapshot = self._adapters is None
        if is_snapshot:
            self._changes.clear()
            changes = _Changes({request_id: stream.request for request_id, stream in view.running.items()})
        else:
            changes = self._changes.popleft()
        if not self._changes:
            self._changes.append(_Changes())
            self._due_at = None
        report = worker_pb2.ControlReport(
            snapshot=is_snapshot,
            sequence_slots=self._sequence_slots,
            running_sequences=view.unfinished_sequences,
            kv_blocks_total=stats.blocks_total,
            kv_blocks_free=stats.blocks_free,
            block_size=stats.block_size,
            draining=self._is_draining,
            max_sequences=self._max_sequences,
            finished_request_ids=list(changes.ended),
            kv_block_bytes=self._kv_block_bytes if is_snapshot else 0,
            counters=status_pb2.WorkerCounters(**{name: getattr(stats, name) for name in _COUNTERS}),
        )
        before, self._adapters = self._adapters or {}, view.adapters
        if before is not view.adapters:
            for uid, tier in view.adapters.items():
                if before.get(uid) is not tier:
                    report.adapters.add(adapter_uid=uid, tier=TIERS[tier])
            for uid in before:
                if uid not in view.adapters:
                    report.adapters.add(adapter_uid=uid)
        for request in changes.started.values():
            report.started.add(
                request_id=request.request_id,
                tenant_id=request.tenant_id,
                qos_class=QOS_NUMBERS[request.qos_class],
                sequences=request.num_open,
            )
        if (dedicated := self._dedicated()) != self._told_dedicated:
            self._told_dedicated = dedicated
            report.dedication.CopyFrom(dedication_message(dedicated))
        self._add_flows(report)
        self._add_tenants(report)
        self._add_setbacks(report)
        return report

    def _add_flows(self, report: worker_pb2.ControlReport) -> None:
        loads, flows, known = self._view.loads(), self._view.flows, self._flows
        for flow in flows | loads:
            tokens, load = flows.get(flow, _NO_TOKENS), loads.get(flow, _NO_LOAD)
            if known.get(flow) == (tokens, load):
                continue
            known[flow] = (tokens, load)
            tenant_id, qos_class = flow
            report.flows.add(
                tenant_id=tenant_id,
                qos_class=QOS_NUMBERS[qos_class],
                prompt_tokens=tokens.prompt_tokens,
                output_tokens=tokens.output_tokens,
                slotted_sequences=load.slotted,
                ready_sequences=load.ready,
                held_sequences=load.held,
            )

    def _add_tenants(self, report: worker_pb2.ControlReport) -> None:
        known, self._kv_blocks = self._kv_blocks, dict(self._view.kv_blocks)
        for tenant_id in known | self._kv_blocks:
            blocks = self._kv_blocks.get(tenant_id, 0)
            if blocks != known.get(tenant_id, 0):
                report.tenants.add(tenant_id=tenant_id, kv_blocks=blocks)
        before, self._tenant_adapters = self._tenant_adapters, self._view.tenant_adapters
        if before is not self._tenant_adapters:
            for tenant_id in {**before, **self._tenant_adapters}:
                mine = self._tenant_adapters.get(tenant_id, _NO_ADAPTERS)
                if mine != before.get(tenant_id, _NO_ADAPTERS):
                    counts = mine._asdict() | {"pins": [_pin_status(state) for state in mine.pins]}
                    report.tenant_adapters.add(tenant_id=tenant_id, **counts)

    def _add_setbacks(self, report: worker_pb2.ControlReport) -> None:
        # the last ones in the view have grown
        known = self._setbacks
        for tenant_id in reversed(self._view.setbacks):
            setbacks = self._view.setbacks[tenant_id]
            if known.get(tenant_id) == setbacks:
                break
            known[tenant_id] = setbacks
            report.setbacks.add(tenant_id=tenant_id, **setbacks._asdict())

    def _tell_at(self, due_at: float) -> None:
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at
            self._waiter.wake()


def _pin_status(state: PinState) -> status_pb2.PinStatus:
    pin = state.pin
    return status_pb2.PinStatus(
        name=pin.name,
        adapter_version=digest_of(pin.uid) if pin.uid else "",
        workers=1,
        on_device=int(state.is_ready),
        problem=state.problem,
    )


_NO_TOKENS, _NO_LOAD = FlowTokens(), FlowLoad()
_NO_ADAPTERS = TenantAdapters()
_COUNTERS = tuple(status_pb2.WorkerCounters.DESCRIPTOR.fields_by_name)  # by name as EngineStats has them
