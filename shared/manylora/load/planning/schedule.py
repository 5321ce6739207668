"""What is sent when: a mix and its seed to requests, the same ones each time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from manylora.load.planning.arrivals import Arrivals, Closed, Trace, TraceRow
from manylora.load.planning.mix import Mix, Tenant
from manylora.load.planning.sizes import Weighted, zipf_weights


class Piece(NamedTuple):
    """Of a prompt: pieces with one seed are the same text."""

    seed: str
    tokens: int


@dataclass(frozen=True)
class Planned:
    """at_s: from the run's beginning; 0 in a closed loop. model: empty: the server's own."""

    at_s: float
    tenant: Tenant
    model: str
    prompt: tuple[Piece, ...]
    output_tokens: int
    seed: int


@dataclass(frozen=True)
class Loop:
    """`streams` callers take their next requests of one source."""

    streams: int
    think_s: float
    requests: Iterator[Planned]


def open_loop(mix: Mix) -> Iterator[Planned]:
    """In order of time, as far as the mix's duration."""
    sources = [_timed(mix, name, tenants, arrivals) for name, tenants, arrivals in _flows(mix)]
    merged = heapq.merge(*(source for source in sources if source is not None), key=lambda planned: planned.at_s)
    ends_s = math.inf if mix.duration_s is None else mix.duration_s
    return itertools.takewhile(lambda planned: planned.at_s < ends_s, merged)


def closed_loops(mix: Mix) -> list[Loop]:
    found = []
    for name, tenants, arrivals in _flows(mix):
        if isinstance(arrivals, Closed):
            draw, rng = _drawer(mix, name, tenants), Random(f"{mix.seed}/{name}/closed")
            requests = (draw(0.0, None, rng.getrandbits(32)) for _ in itertools.count())
            found.append(Loop(arrivals.streams, arrivals.think_s, requests))
    return found


def _flows(mix: Mix) -> Iterator[tuple[str, Sequence[Tenant], Arrivals]]:
    common = [tenant for tenant in mix.tenants if tenant.arrivals is None]
    if mix.arrivals is not None and common:
        yield "*", common, mix.arrivals
    for tenant in mix.tenants:
        if tenant.arrivals is not None:
            yield tenant.name, [tenant], tenant.arrivals


def _timed(mix: Mix, name: str, tenants: Sequence[Tenant], arrivals: Arrivals) -> Iterator[Planned] | None:
    """None: a closed loop. Times and contents are drawn apart, so that one process may stand in for another."""
    rng = Random(f"{mix.seed}/{name}/times")
    draw = _drawer(mix, name, tenants)
    if isinstance(arrivals, Closed):
        return None
    if isinstance(arrivals, Trace):
        trace = arrivals
        return (draw(row.at_s / trace.speed, (trace, row), number) for number, row in enumerate(trace.rows))
    return (draw(at_s, None, number) for number, at_s in enumerate(arrivals.times(rng)))


def _drawer(
    mix: Mix, name: str, tenants: Sequence[Tenant]
) -> Callable[[float, tuple[Trace, TraceRow] | None, int], Planned]:
    rng = Random(f"{mix.seed}/{name}/contents")
    whose = Weighted([tenant.share for tenant in tenants])
    adapters = {
        tenant.name: Weighted(zipf_weights(len(tenant.adapters), tenant.zipf)) for tenant in tenants if tenant.adapters
    }

    def draw(at_s: float, traced: tuple[Trace, TraceRow] | None, number: int) -> Planned:
        tenant = tenants[whose.draw(rng)]
        model = tenant.model
        if tenant.adapters and rng.random() >= tenant.base_part:
            model = tenant.adapters[adapters[tenant.name].draw(rng)]
        prompt_tokens, output_tokens = tenant.prompt.draw(rng), tenant.output.draw(rng)
        seed = rng.getrandbits(32)
        own = f"{mix.seed}/{name}/{number}/{seed}"
        if traced is None or not tenant.traced_lengths:
            prompt = _prompt(tenant, prompt_tokens, own)
        else:
            trace, row = traced
            output_tokens = max(1, round(row.output_tokens * trace.length_scale))
            prompt = _traced_prompt(tenant, trace, row, own)
        return Planned(at_s, tenant, model, prompt, output_tokens, seed)

    return draw


def _prompt(tenant: Tenant, tokens: int, own: str) -> tuple[Piece, ...]:
    """The prefix is the tenant's in every request; it is part of the prompt's length."""
    shared = min(tenant.prefix_tokens, tokens - 1)
    return (*([Piece(f"prefix/{tenant.name}", shared)] if shared > 0 else []), Piece(own, tokens - max(0, shared)))


def _traced_prompt(tenant: Tenant, trace: Trace, row: TraceRow, own: str) -> tuple[Piece, ...]:
    """A block that the trace names twice is the same text twice, in one tenant."""
    left = max(1, round(row.prompt_tokens * trace.length_scale))
    size = max(1, round(trace.block_tokens * trace.length_scale))
    pieces = []
    for block in row.blocks:
        if left <= size:
            break
        pieces.append(Piece(f"block/{tenant.name}/{block}", size))
        left -= size
    return (*pieces, Piece(own, left))
