"""What a gRPC call is asked by its metadata, before a byte of its message is read: whose key, and is there a place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from manylora_shared.errors import ManyloraError, Overloaded, PermissionDenied, Unauthenticated
from manylora_shared.metadata import TENANT_KEY
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY, Principal, host_of
from manylora_shared.transport.base import ServerCall
from manylora_shared.transport.places import Pace, Places, Refusals
from manylora_shared.transport.unparsed import LARGE_BYTES

from manylora_router.guard.admission import MAX_TEXT_BYTES
from manylora_router.links.callers import Callers, Found, Seen
from manylora_router.links.loop_turns import LoopTurns

# The longest text, and what stands beside one: of chat messages the roles, of a request its stop strings.
MAX_REQUEST_BYTES = MAX_TEXT_BYTES + 256 * 1024

CAPACITY = 16_384  # calls under way, of all tenants and fronts
KEPT = 1_024  # of these, for tenants that have few
SLOW_CAPACITY = 256  # calls that wait for their message; most of it may be in memory
SLOW_KEPT = 64
ADMIN_CAPACITY = 512  # calls of AdminService; each asks etcd
ADMIN_KEPT = 128
ADMIN_CALLS_PER_S = 64.0  # of a tenant
_TOO_MANY = f"this tenant asks for more than {ADMIN_CALLS_PER_S:g} of AdminService's calls a second"
LARGE_BYTES_PER_S = 32 << 20  # of a tenant's requests over LARGE_BYTES

TenantOf = Callable[[Principal, ServerCall], str]


@dataclass(frozen=True)
class Bounds:
    """What all services' calls share."""

    places: Places = field(default_factory=lambda: Places(CAPACITY, kept=KEPT))
    slow: Places = field(default_factory=lambda: Places(SLOW_CAPACITY, kept=SLOW_KEPT, few=8))
    entering: LoopTurns = field(default_factory=LoopTurns)
    turns: LoopTurns = field(default_factory=LoopTurns)
    refusals: Refusals = field(default_factory=Refusals)


@dataclass(frozen=True)
class OwnBounds:
    """What a service's calls need besides, each in a turn of its tenant's."""

    places: Places = field(default_factory=lambda: Places(ADMIN_CAPACITY, kept=ADMIN_KEPT, few=4))
    pace: Pace = field(default_factory=lambda: Pace(ADMIN_CALLS_PER_S, _TOO_MANY))


class Gate:
    """Of one service."""

    def __init__(
        self,
        callers: Callers,
        bounds: Bounds,
        *,
        tenant_of: TenantOf,
        max_message_bytes: int,
        pace: Pace,
        own: OwnBounds | None = None,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.bounds = bounds
        self.pace = pace
        self.own = own
        self._callers = callers
        self._tenant_of = tenant_of

    async def before_entering(self, call: ServerCall) -> Callable[[], Pass]:
        peer = self._callers.peer_of(call)
        seen = self._callers.seen(call.metadata.get(AUTHORIZATION_KEY, ""), peer)
        account = "strangers"
        if isinstance(seen, Found):
            with contextlib.suppress(PermissionDenied):
                account = account_of(self._tenant_of(seen.principal, call))
        await self.bounds.entering.take((account, None), 1)
        return partial(self._enter, call, peer, seen)

    def _enter(self, call: ServerCall, peer: str, seen: Seen) -> Pass:
        # raises Unauthenticated, PermissionDenied, Overloaded or ServiceUnavailable
        principal = self._callers.known(call.metadata.get(AUTHORIZATION_KEY, ""), peer, seen)
        tenant = self._tenant_of(principal, call)
        account = account_of(tenant)
        self.bounds.places.enter(account)
        if self.own is not None:
            try:
                self.own.places.enter(account)
            except Overloaded:
                self.bounds.places.leave(account)
                raise
        return Pass(self, tenant, account, account_of(own_tenant(principal)))

    async def before_refusal(self, call: ServerCall, refusal: ManyloraError) -> None:
        if isinstance(refusal, Unauthenticated):  # any number of keys that are none
            account = f"strangers at {host_of(self._callers.peer_of(call))}"
        else:
            account = f"key {hash((call.metadata.get(AUTHORIZATION_KEY), call.metadata.get(TENANT_KEY)))}"
        await self.bounds.refusals.due(account)


class Pass:
    """A call that has its place until `release`."""

    __slots__ = ("_account", "_gate", "_is_paced", "_tenant", "owner")

    def __init__(self, gate: Gate, tenant: str, account: str, owner: str) -> None:
        self.owner = owner
        self._gate = gate
        self._tenant = tenant
        self._account = account
        self._is_paced = gate.own is None or not tenant  # operators are trusted

    def slow(self) -> Callable[[], None]:
        """Raises Overloaded."""
        account = f"{self._account} whose message is not there yet"
        self._gate.bounds.slow.enter(account)
        return partial(self._gate.bounds.slow.leave, account)

    async def before_parsing(self, size_bytes: int) -> None:
        if not self._is_paced and self._gate.own is not None:
            self._is_paced = True
            await self._gate.own.pace.wait(self._account)
        if size_bytes > LARGE_BYTES:
            await self._gate.pace.wait(self._tenant, size_bytes)
        if size_bytes > LARGE_BYTES or self._gate.own is not None:  # it is looked through and parsed in that turn
            await self._gate.bounds.turns.take((self._tenant, None), 1)

    def release(self) -> None:
        if self._gate.own is not None:
            self._gate.own.places.leave(self._account)
        self._gate.bounds.places.leave(self._account)


def account_of(tenant: str) -> str:
    return f"tenant {tenant}" if tenant else "the keys of no tenant"


def own_tenant(principal: Principal) -> str:
    """Empty for an operator's or a gateway's key."""
    return principal.tenant_id or ""
