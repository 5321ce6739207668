"""What a gRPC call is asked by its metadata, before a byte of its message is read: whose key, and is there a place."""

from __future__ import annotations

from collections.abc import Callable

from manylora_shared.tenancy.identity import Principal, authenticate
from manylora_shared.transport.base import ServerCall
from manylora_shared.transport.places import Places

from manylora_router.front.loop_turns import LoopTurns
from manylora_router.guard.admission import MAX_TEXT_BYTES
from manylora_router.links.directory import Directory

# The longest text, and what stands beside one: of chat messages the roles, of a request its stop strings.
MAX_REQUEST_BYTES = MAX_TEXT_BYTES + 256 * 1024
LARGE_BYTES = 32 * 1024  # a message over it is parsed in a turn of its tenant's

CAPACITY = 16_384  # calls under way, of all tenants and fronts
KEPT = 1_024  # of these, for tenants that have few

TenantOf = Callable[[Principal, ServerCall], str]


class Gate:
    """Of one service; `places` and `turns` are all services'."""

    def __init__(
        self, directory: Directory, places: Places, turns: LoopTurns, *, tenant_of: TenantOf, max_message_bytes: int
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._directory = directory
        self._places = places
        self._turns = turns
        self._tenant_of = tenant_of

    def enter(self, call: ServerCall) -> Pass:
        """Raises Unauthenticated, PermissionDenied or Overloaded."""
        principal = authenticate(call.metadata, self._directory.key_of)
        tenant = self._tenant_of(principal, call)
        account = account_of(tenant)
        self._places.enter(account)
        return Pass(tenant, account, account_of(own_tenant(principal)), self._places, self._turns)


class Pass:
    """A call that has its place until `release`."""

    __slots__ = ("_account", "_places", "_tenant", "_turns", "owner")

    def __init__(self, tenant: str, account: str, owner: str, places: Places, turns: LoopTurns) -> None:
        self.owner = owner
        self._tenant = tenant
        self._account = account
        self._places = places
        self._turns = turns

    async def before_parsing(self, size_bytes: int) -> None:
        if size_bytes > LARGE_BYTES:
            await self._turns.take((self._tenant, None), 1)

    def release(self) -> None:
        self._places.leave(self._account)


def account_of(tenant: str) -> str:
    return f"tenant {tenant}" if tenant else "the keys of no tenant"


def own_tenant(principal: Principal) -> str:
    """Empty for an operator's or a gateway's key."""
    return principal.tenant_id or ""
