"""What a router lets near the workers, by its history there: circuit breakers and the quarantine of prompts. Owns the
permits of running requests.
"""

# A load's failure is its tenant's; a lost worker or failed step is a tenant's only where no other's request can have
# been the cause. It counts once for all requests that it ended.

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from manylora_shared.errors import CircuitOpen, Quarantined
from manylora_shared.ids import AdapterDigest, TenantId

from manylora_router.guard.circuits import Breakers, Change, CircuitState, Scope
from manylora_router.guard.quarantine import Quarantine


class Fault(enum.Enum):
    NONE = "none"
    NO_VERDICT = "no_verdict"  # refused, cancelled, out of quota or time, or the worker was stopping
    ADAPTER = "adapter"  # it did not load
    WORKER_LOST = "worker_lost"  # while it ran the request
    INTERNAL = "internal"


@dataclass(eq=False)
class Permit:
    tenant: TenantId
    adapter: AdapterDigest | None
    prompt_token_ids: Sequence[int]
    worker_id: str = ""  # empty: none has begun it
    since: float = 0.0
    has_answered: bool = False

    @property
    def scopes(self) -> tuple[Scope, Scope]:
        return (self.tenant, self.adapter), (self.tenant,)


@dataclass(frozen=True)
class Ended:
    changes: list[Change]
    is_quarantined: bool  # from now on


class Guard:
    def __init__(self, *, random: Callable[[], float], getrandbits: Callable[[int], int]) -> None:
        self._breakers = Breakers(random)
        self._quarantine = Quarantine(getrandbits)
        self._workers: dict[str, _Worker] = {}

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self._workers.values())

    def admit(
        self, tenant: TenantId, adapter: AdapterDigest | None, prompt_token_ids: Sequence[int], now: float
    ) -> Permit:
        """Raises Quarantined or CircuitOpen, and nothing has changed; else `ended` follows once."""
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
        """Returns the circuits that its first token closed."""
        permit.has_answered = True
        return self._breakers.answered(permit.scopes, permit)

    def moved(self, permit: Permit, now: float) -> None:
        """Its worker stops, and another goes on with it: nobody's fault."""
        worker = self._workers.get(permit.worker_id) if permit.worker_id else None
        if worker is not None:
            worker.leave(permit, has_completed=True, now=now)
            if not worker.running:
                del self._workers[permit.worker_id]
        permit.worker_id = ""

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
        """That are not closed."""
        return [state for state in self._breakers.states(now) if tenant_id in ("", state.scope[0])]

    def lift_quarantine(self, tenant_id: TenantId, now: float) -> int:
        """Returns how many prompts were quarantined."""
        return self._quarantine.lift(tenant_id, now)

    def quarantines(self, now: float, *, tenant_id: str = "") -> dict[TenantId, tuple[int, float]]:
        """Prompts, and seconds until the last one ends."""
        return {each: told for each, told in self._quarantine.tenants(now).items() if tenant_id in ("", each)}

    def num_quarantined(self, now: float, *, tenant_id: str = "") -> int:
        return self._quarantine.num_quarantined(tenant_id, now)


class _Worker:
    """Remembers those who left while somebody runs who was there with them."""

    def __init__(self) -> None:
        self.running: dict[Permit, None] = {}  # in order of beginning
        self._left: dict[TenantId, float] = {}  # without having completed, oldest first
        self._failures: dict[tuple[TenantId, AdapterDigest | None], float] = {}  # that counted, oldest first

    def is_alone(self, permit: Permit) -> bool:
        """No other tenant's request was here at the same time, unless it completed."""
        if any(other.tenant != permit.tenant for other in self.running):
            return False
        return not any(tenant != permit.tenant and at >= permit.since for tenant, at in self._left.items())

    def is_new(self, permit: Permit, now: float) -> bool:
        # The last failure that counted ended all that had begun before it.
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
    # `times` has the oldest first
    while times and times[first := next(iter(times))] < moment:
        del times[first]
