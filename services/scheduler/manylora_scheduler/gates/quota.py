"""The authority over tenants' quotas: what may be queued, and how many tokens each request may use. Pure.

Owns every lease, request bucket and token account of one term, and stands before the core. How leases begin, are
taken over by the next leader and are written off: docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from manylora_shared.errors import Code, QuotaBreach
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.tenancy.policy import TenantPolicy, TokenRate
from manylora_shared.tenancy.quota import FlowAccount, QuotaLevel, TokenBucket, to_ns

from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    HeldLease,
    LeaseWanted,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    SendGrant,
    SendLease,
    SendLeaseRefusal,
    SendRefusal,
    Settled,
    Tick,
)
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.timers import Timers, earlier
from manylora_scheduler.gates.key_limits import Finding, KeyBook

EXTENSION_WAIT_S = 2.0  # an extension that waits for longer is refused, and its stream ends
ABSENCE_S = 10.0
BUSY_RETRY_S = 0.5  # where others' ends make room, whose time nobody knows
MIN_SLICE_TOKENS = 16
MAX_SLICE_TOKENS = 512
_REQUESTS_PER_S = "quotas.requests_per_s"
_SLICES_PER_S = 4  # A lease grows by what the bucket gains in such a part of a second, within these bounds.


@dataclass
class _Lease:
    request_id: RequestId
    router_id: RouterId
    flow: FlowKey
    max_tokens: int  # the prompt and all output that was asked for
    is_queued: bool
    limits: KeyLimits | None = None  # of the key that asked; one that was taken over has none
    refuse_at: float = 0.0  # of an extension that waits


@dataclass
class _Tenant:
    policy: TenantPolicy | None = None
    requests: TokenBucket | None = None
    accounts: dict[QosClass, FlowAccount[RequestId]] = field(default_factory=dict)
    # When a class's bucket (None: of requests) was taken away: the next fills from then on.
    removed_ns: dict[QosClass | None, int] = field(default_factory=dict)
    leases: dict[RequestId, _Lease] = field(default_factory=dict)
    num_queued: int = 0


@dataclass(frozen=True)
class QuotaView:
    flow: FlowKey
    requests: int
    leased_tokens: int
    settled_tokens: int
    level_tokens: int | None


@dataclass(frozen=True)
class _Refusal:
    message: str
    retry_after_s: float | None
    breaches: tuple[QuotaBreach, ...]


class QuotaAuthority:
    """`began_at`: when the term began, by the clock of all later moments. `settled`: by earlier leaders."""

    def __init__(self, began_at: float, settled: Mapping[FlowKey, int] | None = None) -> None:
        self._began_ns = to_ns(began_at)
        self._tenants: dict[TenantId, _Tenant] = {}
        self._leases: dict[RequestId, _Lease] = {}
        self._by_router: dict[RouterId, dict[RequestId, _Lease]] = {}
        self._sessions: dict[RouterId, int] = {}
        self._waiting: dict[FlowKey, None] = {}
        self._keys = KeyBook(self._began_ns)
        self._timers: Timers[tuple[str, FlowKey | RequestId | RouterId]] = Timers()
        for flow, tokens in (settled or {}).items():
            self._account(flow).settled_tokens = tokens

    # ---- policies

    def set_policy(self, tenant_id: TenantId, policy: TenantPolicy | None, now: float) -> list[Command]:
        # A new bucket begins as if it had been filling since the term began, or since the one before it was taken
        # away: that gives nobody a burst.
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        tenant.policy = policy
        now_ns = to_ns(now)
        quotas = policy.quotas if policy is not None else None
        rate = None
        if quotas is not None and quotas.requests_per_s is not None:
            rate = TokenRate(quotas.requests_per_s, quotas.requests_burst or quotas.requests_per_s)
        tenant.requests = self._bucket(tenant, None, tenant.requests, rate, now_ns)
        for qos_class in QosClass:
            account = tenant.accounts.setdefault(qos_class, FlowAccount(None))
            account.bucket = self._bucket(tenant, qos_class, account.bucket, _rate_of(policy, qos_class), now_ns)
        commands: list[Command] = []
        for qos_class in QosClass:
            commands += self._serve(FlowKey(tenant_id, qos_class), now)
        self._forget_if_gone(tenant_id)
        return commands

    def _bucket(
        self,
        tenant: _Tenant,
        qos_class: QosClass | None,
        before: TokenBucket | None,
        rate: TokenRate | None,
        now_ns: int,
    ) -> TokenBucket | None:
        if rate is None:
            if before is not None:
                tenant.removed_ns[qos_class] = now_ns
            return None
        if before is None:
            since_ns = tenant.removed_ns.get(qos_class, self._began_ns)
            return TokenBucket(rate.rate_tps, rate.burst_tps, since_ns, level=0)
        if (before.rate, before.burst) != (rate.rate_tps, rate.burst_tps):
            before.change(rate.rate_tps, rate.burst_tps, now_ns)
        return before

    # ---- requests

    def admit(self, request: QueuedRequest, now: float) -> _Refusal | None:
        """Opens a lease, unless the request has one. None: it may be queued."""
        known = self._leases.get(request.request_id)
        if known is not None:
            if known.router_id == request.router_id:
                self._set_queued(known, True)
            return None  # another router's id: the core refuses that
        flow, now_ns = request.flow, to_ns(now)
        tenant = self._tenant(flow.tenant_id)
        account = tenant.accounts[flow.qos_class]
        most = request.prompt_tokens + request.max_new_tokens
        first = _first_lease(account.bucket, request.prompt_tokens, request.max_new_tokens)
        found = self._keys.findings(flow.tenant_id, request.limits, most, now_ns) if request.limits else []
        refusal = self._refusal(tenant, flow, first, found, now_ns)
        if refusal is not None:
            return refusal
        if tenant.requests is not None:
            tenant.requests.take(1, now_ns)
        account.open(request.request_id, first, now_ns)
        if request.limits is not None:
            self._keys.begin(flow.tenant_id, request.limits, request.request_id, most, now_ns)
        self._add(_Lease(request.request_id, request.router_id, flow, most, False, request.limits))
        self._set_queued(self._leases[request.request_id], True)
        return None

    def lease_command(self, request: QueuedRequest, session: int, now: float) -> list[Command]:
        # A tenant without quotas gets none.
        lease = self._leases.get(request.request_id)
        if lease is None or lease.router_id != request.router_id:
            return []
        tokens = self._account(lease.flow).tokens_of(request.request_id)
        tenant = self._tenants[lease.flow.tenant_id]
        if tokens is None and (tenant.policy is None or not _has_quotas(tenant.policy)):
            return []
        levels = self._levels(tenant, lease.flow, to_ns(now))
        return [SendLease(lease.router_id, session, lease.request_id, tokens, levels)]

    def _levels(self, tenant: _Tenant, flow: FlowKey, now_ns: int) -> tuple[QuotaLevel, ...]:
        tokens = tenant.accounts[flow.qos_class].bucket
        buckets = ((_REQUESTS_PER_S, tenant.requests), (_token_bucket(flow.qos_class), tokens))
        return tuple(bucket.told(quota, now_ns) for quota, bucket in buckets if bucket is not None)

    def granted(self, request: QueuedRequest) -> None:
        lease = self._lease_of(request)
        if lease is not None:
            self._set_queued(lease, False)

    def refused(self, request: QueuedRequest, now: float) -> list[Command]:
        # The core refused what was admitted here. What a resumed one has used is its router's to settle.
        lease = self._lease_of(request)
        if request.is_resumed:
            self.granted(request)
            return []
        return self.settle(lease.router_id, lease.request_id, 0, now) if lease is not None else []

    def want_more(self, router_id: RouterId, session: int, request_id: RequestId, now: float) -> list[Command]:
        lease = self._leases.get(request_id)
        if lease is None or lease.router_id != router_id:
            message = "the scheduler does not know the request's lease"
            return [SendLeaseRefusal(router_id, session, request_id, message, BUSY_RETRY_S, ())]
        account = self._account(lease.flow)
        tokens = account.tokens_of(request_id)
        if tokens is None or tokens >= lease.max_tokens:
            return [SendLease(router_id, session, request_id, tokens)]
        account.extend(request_id, min(_slice(account.bucket), lease.max_tokens - tokens))
        lease.refuse_at = now + EXTENSION_WAIT_S
        self._timers.set(("refuse", request_id), lease.refuse_at)
        return self._serve(lease.flow, now)

    def settle(self, router_id: RouterId, request_id: RequestId, used: int, now: float) -> list[Command]:
        # One that is settled already, or was never admitted, is ignored.
        lease = self._leases.get(request_id)
        if lease is None or lease.router_id != router_id:
            return []
        # What the request can use at most bounds what a router can say that it did.
        used = min(used, lease.max_tokens)
        self._account(lease.flow).settle(request_id, used, to_ns(now))
        self._end_of_key(lease, used, to_ns(now))
        commands = self._serve(lease.flow, now)
        self._remove(lease)
        return commands

    # ---- routers

    def router_connected(self, router_id: RouterId, session: int, held: Iterable[HeldLease]) -> None:
        """Takes over what an earlier leader leased, and writes off what the router has no more."""
        self._sessions[router_id] = session
        self._timers.cancel(("absent", router_id))
        leases = {each.request_id: each for each in held}
        for lease in list(self._by_router.get(router_id, {}).values()):
            if lease.request_id not in leases:
                self._write_off(lease)
        for request_id, each in leases.items():
            if request_id in self._leases:
                continue
            self._tenant(each.flow.tenant_id).accounts[each.flow.qos_class].take_over(request_id, each.tokens)
            self._add(_Lease(request_id, router_id, each.flow, each.max_tokens, is_queued=False))

    def router_disconnected(self, router_id: RouterId, session: int, now: float) -> None:
        if self._sessions.get(router_id) == session:
            self._timers.set(("absent", router_id), now + ABSENCE_S)

    # ---- time

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while (due := self._timers.pop_due(now)) is not None:
            match due:
                case ("serve", FlowKey() as flow):
                    commands += self._serve(flow, now)
                case ("refuse", request_id):
                    commands += self._refuse_extension(RequestId(str(request_id)), now)
                case ("absent", router_id):
                    for lease in list(self._by_router.get(RouterId(str(router_id)), {}).values()):
                        self._write_off(lease)
                    self._sessions.pop(RouterId(str(router_id)), None)
        return commands

    def next_wakeup(self) -> float | None:
        return self._timers.next_at()

    # ---- status

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def settled(self) -> dict[FlowKey, int]:
        """For the next leader."""
        return {
            FlowKey(tenant_id, qos_class): account.settled_tokens
            for tenant_id, tenant in self._tenants.items()
            for qos_class, account in tenant.accounts.items()
            if account.settled_tokens
        }

    def views(self, now: float) -> list[QuotaView]:
        """Flows that hold leases or have used anything."""
        found: list[QuotaView] = []
        for tenant_id, tenant in sorted(self._tenants.items()):
            for qos_class, account in tenant.accounts.items():
                if not len(account) and not account.settled_tokens and account.bucket is None:
                    continue
                level = account.bucket.level(to_ns(now)) if account.bucket is not None else None
                view = QuotaView(
                    FlowKey(tenant_id, qos_class), len(account), account.leased_tokens, account.settled_tokens, level
                )
                found.append(view)
        return found

    def check_invariants(self) -> None:
        assert sum(len(leases) for leases in self._by_router.values()) == len(self._leases)
        for tenant in self._tenants.values():
            assert tenant.num_queued == sum(lease.is_queued for lease in tenant.leases.values())
            assert sum(len(account) for account in tenant.accounts.values()) == len(tenant.leases)
        assert sum(len(tenant.leases) for tenant in self._tenants.values()) == len(self._leases)

    # ---- the inside

    def _refusal(
        self, tenant: _Tenant, flow: FlowKey, first: int, of_key: list[Finding], now_ns: int
    ) -> _Refusal | None:
        # Its hint is that of the quota that takes longest.
        found = list(of_key)
        if tenant.policy is not None:
            found += self._breached(tenant, tenant.policy, flow, first, now_ns)
        if not found:
            return None
        waits = [each.wait_ns for each in found]
        never = any(wait is None for wait in waits)
        breaches = tuple(
            QuotaBreach(each.quota, flow.tenant_id, each.limit, each.description, each.capacity) for each in found
        )
        message = "; ".join(f"{breach.quota}: {breach.description}" for breach in breaches)
        return _Refusal(message, None if never else _seconds(max(wait or 0 for wait in waits)), breaches)

    @staticmethod
    def _breached(tenant: _Tenant, policy: TenantPolicy, flow: FlowKey, first: int, now_ns: int) -> list[Finding]:
        quotas = policy.quotas
        found: list[Finding] = []
        busy_ns = to_ns(BUSY_RETRY_S)
        if quotas.concurrency is not None and len(tenant.leases) >= quotas.concurrency:
            description = f"{len(tenant.leases)} requests run or wait already"
            found.append(Finding("quotas.concurrency", quotas.concurrency, description, busy_ns))
        if quotas.max_queued is not None and tenant.num_queued >= quotas.max_queued:
            description = f"{tenant.num_queued} requests wait already"
            found.append(Finding("quotas.max_queued", quotas.max_queued, description, busy_ns))
        if tenant.requests is not None and (wait_ns := tenant.requests.wait_ns(1, now_ns)):
            rate, burst = tenant.requests.rate, tenant.requests.burst
            description = f"no more than {rate} requests a second are admitted, {burst} at once"
            found.append(Finding(_REQUESTS_PER_S, rate, description, wait_ns, burst))
        account = tenant.accounts[flow.qos_class]
        wait_ns = account.wait_ns(first, now_ns)
        if wait_ns != 0:
            assert account.bucket is not None
            description = f"{first} tokens are needed to begin; the bucket holds {account.bucket.level(now_ns)}"
            if wait_ns is None:
                description = f"{first} tokens are needed to begin, more than burst_tps, {account.bucket.burst}"
            bucket = account.bucket
            found.append(Finding(_token_bucket(flow.qos_class), bucket.rate, description, wait_ns, bucket.burst))
        return found

    def _serve(self, flow: FlowKey, now: float) -> list[Command]:
        account, now_ns = self._account(flow), to_ns(now)
        commands: list[Command] = []
        for request_id in account.serve(now_ns):
            lease = self._leases[request_id]
            self._timers.cancel(("refuse", request_id))
            session = self._sessions.get(lease.router_id)
            if session is not None:
                commands.append(SendLease(lease.router_id, session, request_id, account.tokens_of(request_id)))
        at_ns = account.next_service_ns(now_ns)
        if at_ns is None:
            self._timers.cancel(("serve", flow))
        else:
            self._timers.set(("serve", flow), max(now, _after(at_ns)))
        return commands

    def _refuse_extension(self, request_id: RequestId, now: float) -> list[Command]:
        lease = self._leases.get(request_id)
        if lease is None:
            return []
        account = self._account(lease.flow)
        account.give_up(request_id)
        commands = self._serve(lease.flow, now)
        session = self._sessions.get(lease.router_id)
        if session is None or account.bucket is None:
            return commands
        quota = f"classes.{lease.flow.qos_class.value}.token_bucket"
        description = f"no tokens came free for {EXTENSION_WAIT_S:g} s"
        bucket = account.bucket
        breach = QuotaBreach(quota, lease.flow.tenant_id, bucket.rate, description, bucket.burst)
        wait_ns = account.wait_ns(_slice(account.bucket), to_ns(now)) or 0
        refusal = SendLeaseRefusal(
            lease.router_id, session, request_id, f"{quota}: {description}", _seconds(wait_ns), (breach,)
        )
        return [*commands, refusal]

    def _tenant(self, tenant_id: TenantId) -> _Tenant:
        if tenant_id not in self._tenants:
            self._tenants[tenant_id] = _Tenant(accounts={qos_class: FlowAccount(None) for qos_class in QosClass})
        return self._tenants[tenant_id]

    def _account(self, flow: FlowKey) -> FlowAccount[RequestId]:
        return self._tenant(flow.tenant_id).accounts[flow.qos_class]

    def _lease_of(self, request: QueuedRequest) -> _Lease | None:
        lease = self._leases.get(request.request_id)
        return lease if lease is not None and lease.router_id == request.router_id else None

    def _set_queued(self, lease: _Lease, is_queued: bool) -> None:
        self._tenants[lease.flow.tenant_id].num_queued += is_queued - lease.is_queued
        lease.is_queued = is_queued

    def _add(self, lease: _Lease) -> None:
        self._leases[lease.request_id] = lease
        self._by_router.setdefault(lease.router_id, {})[lease.request_id] = lease
        self._tenants[lease.flow.tenant_id].leases[lease.request_id] = lease

    def _remove(self, lease: _Lease) -> None:
        self._set_queued(lease, False)
        self._timers.cancel(("refuse", lease.request_id))
        del self._leases[lease.request_id]
        del self._tenants[lease.flow.tenant_id].leases[lease.request_id]
        del self._by_router[lease.router_id][lease.request_id]
        if not self._by_router[lease.router_id]:
            del self._by_router[lease.router_id]
        self._forget_if_gone(lease.flow.tenant_id)

    def _end_of_key(self, lease: _Lease, used: int, now_ns: int) -> None:
        if lease.limits is not None:
            self._keys.end(lease.flow.tenant_id, lease.limits, lease.request_id, used, now_ns)

    def _write_off(self, lease: _Lease) -> None:
        self._end_of_key(lease, lease.max_tokens, 0)  # nothing comes back, at no time
        self._account(lease.flow).write_off(lease.request_id)
        self._remove(lease)

    def _forget_if_gone(self, tenant_id: TenantId) -> None:
        # A tenant that was deleted is forgotten with its last lease.
        tenant = self._tenants[tenant_id]
        if tenant.policy is None and not tenant.leases:
            for qos_class in tenant.accounts:
                self._timers.cancel(("serve", FlowKey(tenant_id, qos_class)))
            del self._tenants[tenant_id]


def _token_bucket(qos_class: QosClass) -> str:
    return f"classes.{qos_class.value}.token_bucket"


class Seam(Protocol):
    """The core, or what stands before it."""

    def apply(self, event: Event, now: float) -> list[Command]: ...

    def next_wakeup(self) -> float | None: ...


class QuotaGate:
    def __init__(self, core: Seam, began_at: float, settled: Mapping[FlowKey, int] | None = None) -> None:
        self.authority = QuotaAuthority(began_at, settled)
        self._core = core

    def apply(self, event: Event, now: float) -> list[Command]:
        authority = self.authority
        commands = authority.tick(now)
        match event:
            case LeaseWanted():
                commands += authority.want_more(event.router_id, event.session, event.request_id, now)
                event = Tick()
            case Settled():
                commands += authority.settle(event.router_id, event.request_id, event.tokens, now)
                event = Tick()
            case Enqueued():
                refusal = authority.admit(event.request, now)
                if refusal is None:
                    commands += authority.lease_command(event.request, event.session, now)
                else:
                    commands.append(
                        SendRefusal(
                            event.request,
                            event.session,
                            Code.RESOURCE_EXHAUSTED,
                            refusal.message,
                            refusal.retry_after_s,
                            refusal.breaches,
                        )
                    )
                    event = Tick()
            case RouterConnected():
                authority.router_connected(event.router_id, event.session, event.leases)
            case RouterDisconnected():
                authority.router_disconnected(event.router_id, event.session, now)
            case PolicyChanged():
                commands += authority.set_policy(event.tenant_id, event.policy, now)
        for command in self._core.apply(event, now):
            commands.append(command)
            if isinstance(command, SendGrant):
                authority.granted(command.request)
            elif isinstance(command, SendRefusal):
                commands += authority.refused(command.request, now)
        return commands

    def next_wakeup(self) -> float | None:
        return earlier(self._core.next_wakeup(), self.authority.next_wakeup())


def _rate_of(policy: TenantPolicy | None, qos_class: QosClass) -> TokenRate | None:
    return policy.classes[qos_class].token_bucket if policy is not None else None


def _has_quotas(policy: TenantPolicy) -> bool:
    q = policy.quotas
    return any(value is not None for value in (q.requests_per_s, q.concurrency, q.max_queued))


def _slice(bucket: TokenBucket | None) -> int:
    if bucket is None:
        return MAX_SLICE_TOKENS
    return min(bucket.burst, max(MIN_SLICE_TOKENS, min(MAX_SLICE_TOKENS, bucket.rate // _SLICES_PER_S)))


def _first_lease(bucket: TokenBucket | None, prompt_tokens: int, max_new_tokens: int) -> int:
    """The prompt and a slice of output, as far as the bucket could ever hold it, at least one token."""
    if bucket is None:
        return 0
    least = prompt_tokens + min(1, max_new_tokens)
    return max(least, min(bucket.burst, prompt_tokens + min(max_new_tokens, _slice(bucket))))


def _seconds(wait_ns: int) -> float:
    # Rounding up to the millisecond is never too early.
    return -(-wait_ns // 1_000_000) / 1000


def _after(at_ns: int) -> float:
    # This is the first float that is not before.
    return at_ns / 1e9 + 1e-6
