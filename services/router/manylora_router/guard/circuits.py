"""Circuit breakers (Nygard, "Release It!", ch. 5): repeated failures are refused at once for a while.

Owns one router's circuits, of tenants and of their adapters. Requests from before an opening do not count.
"""

# closed --failures in a row--> open --its time is over--> half-open, one probe --it answers--> closed
#                                    <------------------- it fails: twice as long

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterDigest, TenantId

# with an adapter (None: the base model), or all of a tenant's requests
Scope = tuple[TenantId, AdapterDigest | None] | tuple[TenantId]

ADAPTER_THRESHOLD = 5
TENANT_THRESHOLD = 10
MIN_TENANT_ADAPTERS = 2
FORGET_S = 60.0  # a row ends where nothing failed for so long
MIN_OPEN_S = 1.0
MAX_OPEN_S = 60.0
JITTER = 0.25  # taken off an opening's time at most, so that routers' probes do not come at once
PROBE_S = 30.0  # nobody waits longer for a probe's verdict
PROBE_RETRY_S = 1.0  # for requests that come while a probe runs
MAX_CIRCUITS = 10_000


@dataclass(eq=False)
class _Circuit:
    scope: Scope
    failures: int = 0
    last_failure_at: float = 0.0
    adapters: set[AdapterDigest | None] = field(default_factory=set)  # in this row: a tenant's circuit needs two
    open_until: float | None = None  # None: closed
    openings: int = 0
    probe: object | None = None
    probe_at: float = 0.0

    def wait_s(self, now: float) -> float | None:
        """None: it lets one more in."""
        if self.open_until is None:
            return None
        if now < self.open_until:
            return self.open_until - now
        return PROBE_RETRY_S if self.probe is not None and now < self.probe_at + PROBE_S else None


@dataclass(frozen=True)
class CircuitState:
    scope: Scope
    is_half_open: bool
    retry_after_s: float
    openings: int


@dataclass(frozen=True)
class Change:
    """`open_s` None: the circuit closed."""

    scope: Scope
    open_s: float | None


class Breakers:
    def __init__(self, random: Callable[[], float]) -> None:
        """`random` is uniform in [0, 1)."""
        self._random = random
        self._circuits: dict[Scope, _Circuit] = {}  # by their last failure

    def __len__(self) -> int:
        return len(self._circuits)

    def wait_s(self, scopes: Sequence[Scope], now: float) -> float | None:
        """None: they are let in."""
        waits = [self._circuits[scope].wait_s(now) for scope in scopes if scope in self._circuits]
        return max((wait for wait in waits if wait is not None), default=None)

    def enter(self, scopes: Sequence[Scope], permit: object, now: float) -> None:
        """Only where `wait_s` is None. It is the probe of every circuit here that is not closed."""
        for scope in scopes:
            circuit = self._circuits.get(scope)
            if circuit is not None and circuit.open_until is not None:
                assert circuit.wait_s(now) is None
                circuit.probe, circuit.probe_at = permit, now

    def answered(self, scopes: Sequence[Scope], permit: object) -> list[Change]:
        """Returns the circuits that it closed, as their probe."""
        changes: list[Change] = []
        for scope in scopes:
            circuit = self._circuits.get(scope)
            if circuit is not None and circuit.probe is permit:
                circuit.open_until = circuit.probe = None
                circuit.failures = _threshold(circuit) - 1
                changes.append(Change(scope, None))
        return changes

    def succeeded(self, scopes: Sequence[Scope], permit: object) -> list[Change]:
        # One that is no probe proves nothing about an open circuit.
        changes: list[Change] = []
        for scope in scopes:
            circuit = self._circuits.get(scope)
            if circuit is None or (circuit.open_until is not None and circuit.probe is not permit):
                continue
            del self._circuits[scope]
            if circuit.open_until is not None:
                changes.append(Change(scope, None))
        return changes

    def failed(
        self, scopes: Sequence[Scope], permit: object, adapter: AdapterDigest | None, now: float
    ) -> list[Change]:
        """Returns the circuits that this opened."""
        changes: list[Change] = []
        for scope in scopes:
            circuit = self._circuits.pop(scope, None) or _Circuit(scope)
            self._circuits[scope] = circuit
            if circuit.open_until is None:
                self._count(circuit, adapter, now)
            elif circuit.probe is not permit:
                continue
            circuit.last_failure_at = now
            if circuit.open_until is not None or _is_enough(circuit):
                changes.append(Change(scope, self._open(circuit, now)))
        while len(self._circuits) > MAX_CIRCUITS:
            del self._circuits[next(iter(self._circuits))]
        return changes

    def left(self, scopes: Sequence[Scope], permit: object) -> None:
        """Without a verdict: cancelled, refused, out of quota."""
        for scope in scopes:
            circuit = self._circuits.get(scope)
            if circuit is not None and circuit.probe is permit:
                circuit.probe = None

    def states(self, now: float) -> list[CircuitState]:
        return [
            CircuitState(c.scope, c.open_until <= now, max(0.0, c.wait_s(now) or 0.0), c.openings)
            for c in self._circuits.values()
            if c.open_until is not None
        ]

    def _count(self, circuit: _Circuit, adapter: AdapterDigest | None, now: float) -> None:
        if now - circuit.last_failure_at > FORGET_S:
            circuit.failures = circuit.openings = 0
            circuit.adapters.clear()
        circuit.failures += 1
        if len(circuit.adapters) < MIN_TENANT_ADAPTERS:
            circuit.adapters.add(adapter)

    def _open(self, circuit: _Circuit, now: float) -> float:
        """Returns for how long."""
        open_s = min(MAX_OPEN_S, MIN_OPEN_S * 2.0 ** min(circuit.openings, 30)) * (1.0 - JITTER * self._random())
        circuit.openings += 1
        circuit.open_until = now + open_s
        circuit.probe = None
        return open_s


def _threshold(circuit: _Circuit) -> int:
    return ADAPTER_THRESHOLD if len(circuit.scope) == 2 else TENANT_THRESHOLD


def _is_enough(circuit: _Circuit) -> bool:
    num_adapters = 1 if len(circuit.scope) == 2 else MIN_TENANT_ADAPTERS
    return circuit.failures >= _threshold(circuit) and len(circuit.adapters) >= num_adapters
