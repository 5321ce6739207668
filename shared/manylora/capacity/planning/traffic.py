"""The traffic that is planned for: requests with times, from a load's mix or the usage ledger."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from manylora.capacity.planning.shapes import CannotPlan
from manylora.load.planning.arrivals import Closed
from manylora.load.planning.fields import shown
from manylora.load.planning.mix import Mix, Slo
from manylora.load.planning.schedule import open_loop

_MOST_REQUESTS = 200_000
_MOST_TOKENS = 1 << 40  # of a ledger's row
_LATEST_UNIX_S = 1e12


@dataclass(frozen=True)
class Request:
    """adapter: with its tenant's name, because each tenant has its own copy; empty: the base model."""

    at_s: float
    tenant: str
    qos_class: str
    adapter: str
    rank: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Traffic:
    """slos: by tenant. seconds: that the requests are spread over. listed: adapters that exist, used or not."""

    requests: Sequence[Request]
    seconds: float
    slos: Mapping[str, Slo] = field(default_factory=dict)
    listed: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> Mapping[str, int]:
        """By adapter that is asked for."""
        return {request.adapter: request.rank for request in self.requests if request.adapter}

    @property
    def uses(self) -> Counter[str]:
        return Counter(request.adapter for request in self.requests if request.adapter)

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return sum(request.output_tokens for request in self.requests) / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        return sum(request.prompt_tokens for request in self.requests) / self.seconds

    def without_prefixes(self) -> Traffic:
        return replace(self, requests=[replace(request, cached_tokens=0) for request in self.requests])

    def faster(self, times: float) -> Traffic:
        requests = [replace(request, at_s=request.at_s / times) for request in self.requests]
        return replace(self, requests=requests, seconds=self.seconds / times)

    def first(self, count: int) -> Traffic:
        """Those that come first, in the time in which they come."""
        if len(self.requests) <= count:
            return self
        kept = self.requests[:count]
        return replace(self, requests=kept, seconds=self.requests[count].at_s or self.seconds)

    def part(self, of: int) -> Traffic:
        """One in so many of the requests, drawn."""
        rng = Random(of)
        return self if of == 1 else replace(self, requests=[r for r in self.requests if not rng.randrange(of)])


def traffic_of_mix(mix: Mix, *, seconds: float, rank: int, block_size: int = 16) -> Traffic:
    """The requests that `manylora load` would send of the mix, over its duration or `seconds`. Raises CannotPlan."""
    for tenant in mix.tenants:
        if isinstance(tenant.arrivals, Closed) or (tenant.arrivals is None and isinstance(mix.arrivals, Closed)):
            raise CannotPlan(f"tenants.{tenant.name}.arrivals: a closed loop has no rate to plan for; give `rate`")
    bounded = replace(mix, duration_s=mix.duration_s or seconds)
    most = min(mix.requests or _MOST_REQUESTS, _MOST_REQUESTS)
    requests = []
    for planned in itertools.islice(open_loop(bounded), most):
        tenant = planned.tenant
        is_adapter = bool(tenant.adapters) and planned.model in tenant.adapters
        prompt = sum(piece.tokens for piece in planned.prompt)
        requests.append(
            Request(
                at_s=planned.at_s,
                tenant=tenant.name,
                qos_class=tenant.qos_class or "standard",
                adapter=f"{tenant.name}/{planned.model}" if is_adapter else "",
                rank=(tenant.rank or rank) if is_adapter else 0,
                prompt_tokens=prompt,
                output_tokens=planned.output_tokens,
                cached_tokens=min(tenant.prefix_tokens, prompt - 1) // block_size * block_size,
            )
        )
    if not requests:
        raise CannotPlan("no request comes within the mix's duration")
    span = bounded.duration_s or seconds
    if len(requests) == most:
        span = requests[-1].at_s or span
    listed = {f"{t.name}/{name}": t.rank or rank for t in mix.tenants for name in t.adapters}
    return Traffic(requests, span, {tenant.name: tenant.slo for tenant in mix.tenants}, listed)


def traffic_of_ledger(rows: Sequence[Mapping[str, Any]], *, window_s: float, rank: int) -> Traffic:
    """The window of the rows with the most tokens. Raises CannotPlan."""
    requests = sorted((_request_of(row, f"row {n}", rank) for n, row in enumerate(rows, 1)), key=lambda r: r.at_s)
    requests = [request for request in requests if request.output_tokens]
    if not requests:
        raise CannotPlan("no row has completion tokens")
    best, first, tokens, most = (0, 1), 0, 0, -1
    for last, request in enumerate(requests):
        tokens += request.prompt_tokens + request.output_tokens
        while request.at_s - requests[first].at_s >= window_s:
            tokens -= requests[first].prompt_tokens + requests[first].output_tokens
            first += 1
        if tokens > most:
            most, best = tokens, (first, last + 1)
    kept = requests[best[0] : best[1]]
    begins = kept[0].at_s
    span = max(min(window_s, requests[-1].at_s - requests[0].at_s), 1.0)
    moved = [replace(request, at_s=request.at_s - begins) for request in kept]
    return Traffic(moved, span, {}, {request.adapter: request.rank for request in requests if request.adapter})


def _request_of(row: Mapping[str, Any], where: str, rank: int) -> Request:
    def count(name: str) -> int:
        value = row.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CannotPlan(f"{where}: {name}: must be a whole number, not {shown(value)}")
        if value > _MOST_TOKENS:
            raise CannotPlan(f"{where}: {name}: must be at most {_MOST_TOKENS}, not {shown(value)}")
        return value

    began = row.get("began_unix_s")
    # Not a number compares as false, too.
    if isinstance(began, bool) or not isinstance(began, int | float) or not abs(began) <= _LATEST_UNIX_S:
        raise CannotPlan(f"{where}: began_unix_s: must be a number of seconds, not {shown(began)}")
    tenant, adapter = str(row.get("tenant", "")), str(row.get("adapter", "") or "")
    prompt = max(1, count("prompt_tokens"))
    return Request(
        at_s=float(began),
        tenant=tenant,
        qos_class=str(row.get("class", row.get("qos_class", "")) or "standard"),
        adapter=f"{tenant}/{adapter}" if adapter else "",
        rank=rank * (1 + adapter.count("+")) if adapter else 0,  # a composition computes with the sum of its ranks
        prompt_tokens=prompt,
        output_tokens=count("completion_tokens") + count("unread_tokens"),
        cached_tokens=min(count("cached_tokens"), prompt - 1),
    )
