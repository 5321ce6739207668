"""Short names for what the scheduler's tests build all the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from manylora_scheduler.core.core import Core, CoreLimits, Order
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    RouterConnected,
    SendGrant,
    WorkerJoined,
    WorkerReported,
)
from manylora_scheduler.core.reports import FlowLoad, FlowTokens, Residency, StartedRequest, ToldOwner, WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.succession import ClockSnapshot
from manylora_shared.ids import AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.key_limits import KeyLimits

ROUTER = RouterId("router")


def flow(tenant: str = "acme", qos_class: QosClass = QosClass.STANDARD) -> FlowKey:
    return FlowKey(TenantId(tenant), qos_class)


def request(
    request_id: str,
    *,
    tenant: str = "acme",
    qos_class: QosClass = QosClass.STANDARD,
    router: str = ROUTER,
    prompt_tokens: int = 10,
    max_new_tokens: int = 10,
    sequences: int = 1,
    priority: int = 0,
    adapter: str | None = None,
    deadline: float | None = None,
    is_resumed: bool = False,
    limits: KeyLimits | None = None,
) -> QueuedRequest:
    return QueuedRequest(
        request_id=RequestId(request_id),
        router_id=RouterId(router),
        flow=flow(tenant, qos_class),
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        sequences=sequences,
        priority=priority,
        adapter_uid=AdapterUid(adapter) if adapter is not None else None,
        adapter_id=adapter or "",
        deadline=deadline,
        is_resumed=is_resumed,
        limits=limits,
    )


def report(
    *,
    snapshot: bool = False,
    slots: int = 4,
    running: int = 0,
    blocks: int = 1000,
    free: int | None = None,
    block_size: int = 16,
    draining: bool = False,
    adapters: Mapping[str, Residency] | None = None,
    started: Iterable[StartedRequest] = (),
    finished: Iterable[str] = (),
    flows: Mapping[FlowKey, FlowTokens] | None = None,
    most: int = 0,
    loads: Mapping[str, tuple[int, int, int]] | None = None,
    owner: ToldOwner | None = None,
) -> WorkerReport:
    """loads: by tenant, (slotted, ready, held)."""
    return WorkerReport(
        snapshot=snapshot,
        sequence_slots=slots,
        running_sequences=running,
        kv_blocks_total=blocks,
        kv_blocks_free=blocks if free is None else free,
        block_size=block_size,
        draining=draining,
        adapters={AdapterUid(uid): tier for uid, tier in (adapters or {}).items()},
        started=tuple(started),
        finished=tuple(RequestId(r) for r in finished),
        flows=flows or {},
        max_sequences=most,
        loads={flow(tenant): FlowLoad(*load) for tenant, load in (loads or {}).items()},
        owner=owner,
    )


def started(request_id: str, tenant: str = "acme", sequences: int = 1) -> StartedRequest:
    return StartedRequest(RequestId(request_id), flow(tenant), sequences)


class Desk:
    """A core with a router, and its clock."""

    def __init__(
        self, limits: CoreLimits | None = None, order: Order = "fair", predecessor: ClockSnapshot | None = None
    ) -> None:
        self.core = Core(limits, predecessor, order)
        self.now = 0.0
        self.apply(RouterConnected(ROUTER, 1))

    def apply(self, event: Event) -> list[Command]:
        commands = self.core.apply(event, self.now)
        self.core.check_invariants()
        return commands

    def after(self, seconds: float, event: Event) -> list[Command]:
        self.now += seconds
        return self.apply(event)

    def worker(self, worker_id: str = "w0", **what: object) -> list[Command]:
        """A worker joins and sends its snapshot."""
        joined = self.apply(WorkerJoined(WorkerId(worker_id), f"{worker_id}:1", "cpu", 4096, can_merge=True))
        return joined + self.report(worker_id, snapshot=True, adapters=what.pop("adapters", {}), **what)

    def report(self, worker_id: str = "w0", **what: object) -> list[Command]:
        return self.apply(WorkerReported(WorkerId(worker_id), report(**what)))  # type: ignore[arg-type]

    def enqueue(self, request_id: str, session: int = 1, **what: object) -> list[Command]:
        return self.apply(Enqueued(session, request(request_id, **what)))  # type: ignore[arg-type]


def grants(commands: Iterable[Command]) -> list[tuple[str, str]]:
    """(request, worker) of each grant among some commands."""
    return [(c.request.request_id, c.worker_id) for c in commands if isinstance(c, SendGrant)]
