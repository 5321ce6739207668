"""A guard, and requests that end in no time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from manylora_router.guard.circuits import ADAPTER_THRESHOLD
from manylora_router.guard.permits import Ended, Fault, Guard
from manylora_shared.errors import CircuitOpen
from manylora_shared.ids import AdapterUid, TenantId

ACME, OTHER = TenantId("acme"), TenantId("other")


UP, DOWN = AdapterUid("a" * 64), AdapterUid("b" * 64)


def make(seed: int = 0) -> Guard:
    rng = random.Random(seed)
    return Guard(random=rng.random, getrandbits=rng.getrandbits)


def run(
    guard: Guard,
    fault: Fault,
    now: float,
    *,
    tenant: TenantId = ACME,
    adapter: AdapterUid | None = UP,
    prompt: Sequence[int] = (1, 2),
    worker: str = "w-0",
) -> Ended:
    """One request by itself, from its admission to its end, in no time."""
    permit = guard.admit(tenant, adapter, prompt, now)
    guard.began(permit, worker, now)
    return guard.ended(permit, fault, now + 1e-6)


def is_let_in(guard: Guard, now: float, *, tenant: TenantId = ACME, adapter: AdapterUid | None = UP) -> bool:
    """Asks without leaving a mark."""
    try:
        guard.ended(guard.admit(tenant, adapter, (9, 9, 9), now), Fault.NO_VERDICT, now)
    except CircuitOpen:
        return False
    return True


def opened(guard: Guard, now: float = 0.0) -> float:
    """Opens acme's circuit of UP. Returns when its time is over."""
    for _ in range(ADAPTER_THRESHOLD):
        run(guard, Fault.ADAPTER, now)
    return now + guard.circuits(now)[0].retry_after_s
