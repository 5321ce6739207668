"""What goes into the core and what comes out of it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_shared.errors import Code, QuotaBreach
from manylora_shared.ids import DEFAULT_POOL, AdapterUid, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.overload import OverloadView
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.tenancy.quota import QuotaLevel

from manylora_scheduler.core.reports import Owner, WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a router says it holds. `tokens` None: not bounded."""

    request_id: RequestId
    flow: FlowKey
    tokens: int | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RouterConnected:
    """Numbers of sessions grow; a later one of the same router replaces the earlier."""

    router_id: RouterId
    session: int
    leases: tuple[HeldLease, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterDisconnected:
    router_id: RouterId
    session: int


@dataclass(frozen=True, slots=True)
class Enqueued:
    session: int
    request: QueuedRequest


@dataclass(frozen=True, slots=True)
class Withdrawn:
    session: int
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GrantClosed:
    session: int
    router_id: RouterId
    request_id: RequestId
    worker_id: WorkerId
    reached_worker: bool
    is_unavailable: bool = False  # the worker was tried in vain, not by the request's own doing


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    session: int
    router_id: RouterId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Settled:
    """`tokens`: prompt and output tokens that the request used."""

    router_id: RouterId
    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class RoutersRefused:
    """So many requests of these flows, by the overload view of the pool."""

    flows: tuple[tuple[FlowKey, int], ...]
    pool: str = DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Shed:
    """These requests, with a message and a hint each, are not to wait any longer."""

    requests: tuple[tuple[RequestId, str, float], ...]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A known worker is replaced if its address differs."""

    worker_id: WorkerId
    address: str
    device: str
    max_context_tokens: int
    pool: str = DEFAULT_POOL
    can_merge: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDedicated:
    """Whose the worker is to be; None: everybody's."""

    worker_id: WorkerId
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """What the worker runs goes on."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker_id: WorkerId
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    tenant_id: TenantId
    policy: TenantPolicy | None


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    RouterConnected
    | RouterDisconnected
    | Enqueued
    | Withdrawn
    | GrantClosed
    | LeaseWanted
    | Settled
    | RoutersRefused
    | Shed
    | WorkerJoined
    | WorkerDedicated
    | WorkerLeft
    | WorkerDisconnected
    | WorkerReported
    | PolicyChanged
    | Tick
)


# ---- commands


@dataclass(slots=True)
class SendGrant:
    # Not frozen: that would double what making it costs.
    request: QueuedRequest
    session: int
    worker_id: WorkerId
    worker_address: str
    queue_s: float
    attempt: int
    adapter_resident: bool
    repeated: bool = False
    max_output_tokens: int | None = None  # a choice; None: as many as the request asks for
    overload_level: int = 0  # that of the cap


@dataclass(frozen=True, slots=True)
class SendRefusal:
    request: QueuedRequest
    session: int
    code: Code
    message: str
    retry_after_s: float | None = None
    breaches: tuple[QuotaBreach, ...] = ()


@dataclass(frozen=True, slots=True)
class SendLease:
    """What a request may use in all; None: not bounded."""

    router_id: RouterId
    session: int
    request_id: RequestId
    tokens: int | None
    levels: tuple[QuotaLevel, ...] = ()  # of the first lease


@dataclass(frozen=True, slots=True)
class SendLeaseRefusal:
    router_id: RouterId
    session: int
    request_id: RequestId
    message: str
    retry_after_s: float | None
    breaches: tuple[QuotaBreach, ...]


@dataclass(frozen=True, slots=True)
class SendOverload:
    """To one router, or to all."""

    view: OverloadView
    router_id: RouterId | None = None
    pool: str = DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class SendPrefetch:
    worker_id: WorkerId
    adapter_uid: AdapterUid
    tenant_id: TenantId


@dataclass(frozen=True, slots=True)
class SendDedicate:
    worker_id: WorkerId
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Withdrawn, or its router went: nothing to send."""

    request: QueuedRequest


Command = SendGrant | SendRefusal | SendLease | SendLeaseRefusal | SendOverload | SendPrefetch | SendDedicate | Dropped
