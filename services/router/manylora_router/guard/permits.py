"""What a router lets near the workers, by what happened there: circuit breakers and the quarantine of prompts.

Owns the permits of the requests that run now, and says whose a failure is. An adapter that does not load is its
tenant's. A lost worker and a failed step end the requests of everybody there, so nobody's circuit counts them but
where no other tenant's request, as far as this router knows, can have been the cause: none was in flight on that
worker at the same time, but for those that completed. Prompts get their strikes either way (quarantine.py), which a
bystander sheds with its next completion. One failure, of a worker or of a load, counts once for a circuit, however many
of its requests it ended.

    permit = guard.admit(...)               raises Quarantined, CircuitOpen
    guard.began(permit, worker_id, now)     once a worker runs it
    guard.answered(permit)                  at its first token
    guard.ended(permit, fault, now)         always, once

Pure: time and randomness are passed in.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from manylora_shared.errors import CircuitOpen, Quarantined
from manylora_shared.ids import AdapterUid, TenantId

from manylora_router.guard.circuits import Breakers, Change, CircuitState, Scope
from manylora_router.guard.quarantine import Quarantine


class Fault(enum.Enum):
    """What a request's end says of what it asked for."""

    NONE = "none"
    """It completed."""
    NO_VERDICT = "no_verdict"
    """Nothing: it was refused, cancelled, out of quota or of time, or its worker was stopping."""
    ADAPTER = "adapter"
    """The adapter did not load."""
    WORKER_LOST = "worker_lost"
    """The worker vanished while it ran the request."""
    INTERNAL = "internal"
    """The worker, or this router, failed at it."""


@dataclass(eq=False)
class Permit:
    tenant: TenantId
    adapter: AdapterUid | None
    prompt_token_ids: Sequence[int]
    worker_id: str = ""
    """Empty: no worker has begun it."""
    since: float = 0.0
    """When the worker began it."""
    has_answered: bool = False

    @property
    def scopes(self) -> tuple[Scope, Scope]:
        return (self.tenant, self.adapter), (self.tenant,)


@dataclass(frozen=True)
class Ended:
    """What a request's end changed."""

    changes: list[Change]
    is_quarantined: bool
    """Its prompt is, from now on."""


class Guard:
    def __init__(self, *, random: Callable[[], float], getrandbits: Callable[[int], int]) -> None:
        self._breakers = Breakers(random)
        self._quarantine = Quarantine(getrandbits)
        self._workers: dict[str, _Worker] = {}

    @property
    def num_running(self) -> int:
        """Requests on workers."""
        return sum(len(worker.running) for worker in self._workers.values())

    def admit(
        self, tenant: TenantId, adapter: AdapterUid | None, prompt_token_ids: Sequence[int], now: float
    ) -> Permit:
        """Raises Quarantined or CircuitOpen; then nothing has changed."""
        permit = Permit(tenant, adapter, prompt_token_ids)
        refused_s = self._quarantine.wait_s(tenant, adapter, prompt_token_ids, now)
        if refused_s is not None:
            raise Quarantined(
                "workers failed again and again while they ran this prompt: "
                f"it is refused for another {math.ceil(refused_s)} s"
            )
        wait_s = self._breakers.wait_s(permit.scopes, now)
        if wait_s is not None:
            by_adapter = self._breakers.wait_s(permit.scopes[:1], now) is not None
            whose = "this adapter" if by_adapter else "this tenant"
            raise CircuitOpen(f"requests of {whose} have kept failing: refused for a while", retry_after_s=wait_s)
        self._breakers.enter(permit.scopes, permit, now)
        return permit

    def began(self, permit: Permit, worker_id: str, now: float) -> None:
        permit.worker_id, permit.since = worker_id, now
        self._workers.setdefault(worker_id, _Worker()).running[permit] = None

    def answered(self, permit: Permit) -> list[Change]:
        """The request has its first token. Returns the circuits that this closed."""
        permit.has_answered = True
        return self._breakers.answered(permit.scopes, permit)

    def ended(self, permit: Permit, fault: Fault, now: float) -> Ended:
        worker = self._workers.get(permit.worker_id) if permit.worker_id else None
        counts, is_quarantined = True, False
        if worker is not None:
            is_shared = fault in (Fault.WORKER_LOST, Fault.INTERNAL)
            if is_shared or fault is Fault.ADAPTER:
                counts = (not is_shared or worker.is_alone(permit)) and worker.is_new(permit, now)
            worker.leave(permit, has_completed=fault is Fault.NONE, now=now)
            if not worker.running:
                del self._workers[permit.worker_id]
            if is_shared:
                is_quarantined = self._quarantine.strike(
                    permit.tenant,
                    permit.adapter,
                    permit.prompt_token_ids,
                    worker_id=permit.worker_id,
                    since=permit.since,
                    now=now,
                )
        changes: list[Change] = []
        match fault:
            case Fault.NONE:
                self._quarantine.clear(permit.tenant, permit.adapter, permit.prompt_token_ids)
                changes = self._breakers.succeeded(permit.scopes, permit)
            case Fault.ADAPTER | Fault.WORKER_LOST | Fault.INTERNAL if counts:
                changes = self._breakers.failed(permit.scopes, permit, permit.adapter, now)
            case _:
                self._breakers.left(permit.scopes, permit)
        return Ended(changes, is_quarantined)

    def circuits(self, now: float, *, tenant_id: str = "") -> list[CircuitState]:
        """Those that are not closed; of one tenant, or of all."""
        return [state for state in self._breakers.states(now) if tenant_id in ("", state.scope[0])]

    def lift_quarantine(self, tenant_id: TenantId, now: float) -> int:
        """An operator vouches for the tenant's prompts. Returns how many were quarantined."""
        return self._quarantine.lift(tenant_id, now)

    def quarantines(self, now: float, *, tenant_id: str = "") -> dict[TenantId, tuple[int, float]]:
        """Quarantined prompts and the seconds until the last one ends; of one tenant, or of all."""
        return {each: told for each, told in self._quarantine.tenants(now).items() if tenant_id in ("", each)}

    def num_quarantined(self, now: float, *, tenant_id: str = "") -> int:
        """Prompts."""
        return self._quarantine.num_quarantined(tenant_id, now)


class _Worker:
    """Who ran on one worker together. Remembers those who left as long as somebody runs who was there with them."""

    def __init__(self) -> None:
        self.running: dict[Permit, None] = {}
        """In the order in which they began."""
        self._left: dict[TenantId, float] = {}
        """When a request of the tenant last left without having completed, oldest first."""
        self._failures: dict[tuple[TenantId, AdapterUid | None], float] = {}
        """When a failure last counted, oldest first."""

    def is_alone(self, permit: Permit) -> bool:
        """Whether no other tenant's request, but for those that completed, was here at the same time."""
        if any(other.tenant != permit.tenant for other in self.running):
            return False
        return not any(tenant != permit.tenant and at >= permit.since for tenant, at in self._left.items())

    def is_new(self, permit: Permit, now: float) -> bool:
        """Whether a failure is another than the last one that was counted, which then is this one. What began before a
        failure was ended by it, however late that is noticed: a load that fails ends all who wait for it."""
        key = (permit.tenant, permit.adapter)
        if self._failures.get(key, -1.0) >= permit.since:
            return False
        self._failures.pop(key, None)
        self._failures[key] = now
        return True

    def leave(self, permit: Permit, *, has_completed: bool, now: float) -> None:
        del self.running[permit]
        if not has_completed:
            self._left.pop(permit.tenant, None)
            self._left[permit.tenant] = now
        oldest = next(iter(self.running)).since if self.running else now
        _drop_before(oldest, self._left)
        _drop_before(oldest, self._failures)


K = TypeVar("K")


def _drop_before(moment: float, times: dict[K, float]) -> None:
    """`times` has the oldest first."""
    while times and times[first := next(iter(times))] < moment:
        del times[first]
