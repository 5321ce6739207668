"""From a traffic and a step curve to workers, slots and the arena's split, by playing candidates until one holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from manylora.capacity.planning.curve import Curve
from manylora.capacity.planning.play import Outcome, play, play_unless_late
from manylora.capacity.planning.rules import Rule, rules_of
from manylora.capacity.planning.shapes import BLOCK_TOKENS, GIB, RANKS_AT_ONCE, CannotPlan
from manylora.capacity.planning.traffic import Traffic
from manylora.capacity.planning.worker import WorkerSettings

_MIB = 1 << 20
_STEP_GIB = 2.5  # of a device, for a step's own tensors and its graphs
_MARGIN = 1 / 50  # of a device's memory, that a worker leaves
_KV_SPARE = 1.3  # KV by the most that was held
_SLOTS = (16, 32, 64, 128, 256)
_PLAYED_REQUESTS = 4_000
_CELL_WORKERS = 6  # more are planned for as several such cells
_CELL_REQUESTS = 400  # that one cell has drawn at least, where there are so many
_ENOUGH_REQUESTS = 300  # played: of fewer a 95th percentile is hardly known
_MOST_PLAYED_WORKERS = 2_000  # one by one
_FEW = 20  # of fewer answers no 95th percentile is taken
_SETTLING = 0.1  # of the time, before which answers do not count


@dataclass(frozen=True)
class Wanted:
    """ttft_ms, tpot_ms: p95 of every tenant that has no objective of its own. spare: of the traffic, that the cluster
    must also take.
    """

    ttft_ms: float = 500.0
    tpot_ms: float | None = None
    spare: float = 0.25
    gpu_hour: float | None = None
    host_gib: float = 64.0
    slots: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Plan:
    curve: Curve
    wanted: Wanted
    traffic: Traffic
    workers: int
    settings: WorkerSettings
    expected: Outcome  # of one cell
    cells: int
    played: Traffic
    holds: bool  # the objectives, with the spare traffic: always, where the number of workers was not given
    rules: list[Rule]

    @property
    def played_s(self) -> float:
        return self.played.seconds

    @property
    def is_small_sample(self) -> bool:
        return len(self.played.requests) < _ENOUGH_REQUESTS

    @property
    def tokens_per_s(self) -> float:
        """What is asked for, or, where the workers are too few, what they make."""
        asked = self.traffic.output_tokens_per_s
        if self.holds:
            return asked
        return asked * min(1.0, self.expected.tokens_per_s / self.played.output_tokens_per_s)

    def million(self, tokens_per_s: float) -> float | None:
        """What a million tokens cost."""
        return None if self.hour is None else self.hour / 3600 / tokens_per_s * 1e6

    @property
    def hour(self) -> float | None:
        """What all GPUs cost."""
        price = self.wanted.gpu_hour
        return None if price is None else price * self.workers * self.curve.shape.ranks

    @property
    def host_bytes(self) -> int:
        """Of a rank, for its share of adapters."""
        return _host_bytes(self.curve, self.wanted)

    @property
    def adapters_resident(self) -> int:
        """Of those asked for, on one worker, of their mean size."""
        ranks = self.traffic.ranks
        if not ranks:
            return 0
        mean = sum(ranks.values()) / len(ranks) * self.curve.shape.rank_bytes
        return min(len(ranks), int(self.settings.adapter_bytes / mean))


def plan(traffic: Traffic, curve: Curve, wanted: Wanted) -> Plan:
    """Raises CannotPlan."""
    arena, state_tokens = arena_bytes(curve), curve.shape.state_tokens
    if state_tokens:
        traffic = traffic.without_prefixes()
    longest = max(r.prompt_tokens + r.output_tokens for r in traffic.requests) + state_tokens
    largest = max(traffic.ranks.values(), default=0) * curve.shape.rank_bytes
    if longest * curve.shape.kv_token_bytes + largest > arena:
        raise CannotPlan(
            f"the longest request, {longest} tokens, does not fit into the {arena / GIB:.1f} GiB beside the weights"
        )
    least_ms = curve.service_ms + curve.step_ms(0, 0, prompt_tokens=1)
    for where, ttft_ms in [("--ttft-ms", wanted.ttft_ms), *((name, s.ttft_ms) for name, s in traffic.slos.items())]:
        if ttft_ms is not None and ttft_ms < least_ms:
            raise CannotPlan(f"{where}: no first token comes within {ttft_ms:g} ms; alone one takes {least_ms:.1f}")
    floor = _load(traffic, curve)
    cells = _cells(floor, len(traffic.requests), wanted)
    played = traffic.part(cells).first(_PLAYED_REQUESTS)
    hurried = played.faster(1 + wanted.spare)
    best: tuple[int, WorkerSettings] | None = None
    holds = False
    longest_s = math.inf if wanted.workers else 1.5e-3 * max([wanted.ttft_ms, *_own_ttfts(traffic)])
    for slots in (wanted.slots,) if wanted.slots else _SLOTS:
        roomy = _settings(curve, slots, arena, 0, wanted)
        for count in _counts(floor / cells, best, wanted, cells):
            settings = _split(curve, roomy, count, hurried, arena)
            outcome = play_unless_late(curve, settings, count, hurried, longest_s)
            if outcome is None:
                continue
            does = _holds(outcome, hurried, wanted)
            if does or wanted.workers is not None:
                if best is None or count < best[0] or does > holds:
                    best, holds = (count, settings), does
                break
    if best is None:
        raise CannotPlan("no number of workers and slots keeps the objectives")
    count, settings = best
    outcome = play(curve, settings, count, played)
    workers = count * cells
    rules = rules_of(curve, settings, traffic, outcome, workers, count, played.seconds)
    return Plan(curve, wanted, traffic, workers, settings, outcome, cells, played, holds, rules)


def arena_bytes(curve: Curve) -> int:
    """What a device has left for KV and adapters. Raises CannotPlan."""
    gpu, shape = curve.gpu, curve.shape
    left = int((gpu.memory_gib * (1 - _MARGIN) - _STEP_GIB) * GIB) - shape.weight_bytes
    where = f"one {gpu.name} has" if shape.ranks == 1 else f"each of {shape.ranks} {gpu.name} has"
    if left < GIB // 2:
        raise CannotPlan(
            f"{shape.name}: its weights take {shape.weight_bytes / GIB:.0f} GiB, and {where} {gpu.memory_gib:.0f}: "
            f"--tensor-parallel {2 * shape.ranks} shares them among more"
        )
    if shape.load_bytes > gpu.memory_gib * GIB:
        experts = ", and experts that a checkpoint ships quantized come so" if shape.experts else ""
        raise CannotPlan(
            f"{shape.name}: --quantization {shape.quantization}: before they are quantized its weights take "
            f"{shape.load_bytes / GIB:.0f} GiB on the device, and {where} {gpu.memory_gib:.0f}: --tensor-parallel "
            f"{2 * shape.ranks} shares them among more{experts}"
        )
    return left


def _host_bytes(curve: Curve, wanted: Wanted) -> int:
    return int(wanted.host_gib * GIB) // curve.shape.ranks


def _cells(floor: float, requests: int, wanted: Wanted) -> int:
    # Each has enough workers, and enough requests: a part of few would be drawn with one far from their share, or none.
    cells = max(1, min(int(floor / _CELL_WORKERS), requests // _CELL_REQUESTS))
    if wanted.workers is not None:
        cells = max(number for number in range(1, cells + 1) if wanted.workers % number == 0)
    played = floor / cells if wanted.workers is None else wanted.workers / cells
    if played > _MOST_PLAYED_WORKERS:
        raise CannotPlan(
            f"{requests} requests show the traffic of some {played * cells:,.0f} workers too coarsely: at most "
            f"{_MOST_PLAYED_WORKERS:,} are played for {_CELL_REQUESTS} requests"
        )
    return cells


def _load(traffic: Traffic, curve: Curve) -> float:
    """Workers that would be busy all the time, in full batches."""
    rows = 64
    context = sum(r.prompt_tokens + r.output_tokens / 2 for r in traffic.requests) / len(traffic.requests)
    row_ms = curve.step_ms(rows, int(rows * context)) / rows
    new = sum(r.prompt_tokens - r.cached_tokens for r in traffic.requests) / traffic.seconds
    return (traffic.output_tokens_per_s * row_ms + new * curve.prompt_token_ms) / 1e3


def _counts(floor: float, best: tuple[int, WorkerSettings] | None, wanted: Wanted, cells: int) -> Iterator[int]:
    """Of workers, to be tried; none that would be no better than the best one."""
    if wanted.workers is not None:
        yield wanted.workers // cells
        return
    count = max(1, math.floor(floor * 0.8))
    most = math.ceil(floor * 4) + 2 if best is None else best[0] - 1
    while count <= most:
        yield count
        count += max(1, count // 12)


def _settings(curve: Curve, slots: int, arena: int, adapter_bytes: int, wanted: Wanted) -> WorkerSettings:
    return WorkerSettings(
        slots=slots,
        kv_tokens=(arena - adapter_bytes) // curve.shape.kv_token_bytes // BLOCK_TOKENS * BLOCK_TOKENS,
        adapter_bytes=adapter_bytes,
        host_bytes=_host_bytes(curve, wanted),
    )


def _split(curve: Curve, roomy: WorkerSettings, count: int, traffic: Traffic, arena: int) -> WorkerSettings:
    """KV gets what the most needed of it was, and some; adapters the rest, as far as there are any."""
    ranks = traffic.ranks
    all_bytes = sum(ranks.values()) * curve.shape.rank_bytes
    if not ranks:
        return roomy
    state_tokens = curve.shape.state_tokens
    largest = sorted((r.prompt_tokens + r.output_tokens + state_tokens for r in traffic.requests), reverse=True)
    needed = sum(largest[: max(1, min(roomy.slots, len(largest) // count))])
    likely = 2 * roomy.slots * sum(largest) // len(largest)  # twice the slots' mean: those that are parked count, too
    kv = min(max(largest[0], int(_KV_SPARE * min(needed, likely))) * curve.shape.kv_token_bytes, arena)
    greatest = max(ranks.values()) * curve.shape.rank_bytes
    adapters = max(greatest, min(int(all_bytes * 1.05), arena - kv))
    adapters = min(adapters, arena - largest[0] * curve.shape.kv_token_bytes)
    return replace(
        roomy,
        adapter_bytes=adapters,
        kv_tokens=(arena - adapters) // curve.shape.kv_token_bytes // BLOCK_TOKENS * BLOCK_TOKENS,
    )


def _own_ttfts(traffic: Traffic) -> list[float]:
    return [slo.ttft_ms for slo in traffic.slos.values() if slo.ttft_ms]


def _holds(outcome: Outcome, traffic: Traffic, wanted: Wanted) -> bool:
    after_s = _SETTLING * traffic.seconds
    counted: dict[str, int] = {}
    for answer in outcome.answers:
        counted[answer.tenant] = counted.get(answer.tenant, 0) + 1
    groups = [(tenant, traffic.slos.get(tenant)) for tenant, number in counted.items() if number >= _FEW]
    for tenant, slo in [*groups, (None, None)]:
        ttft = wanted.ttft_ms if slo is None or slo.ttft_ms is None else slo.ttft_ms
        tpot = wanted.tpot_ms if slo is None or slo.tpot_ms is None else slo.tpot_ms
        if tenant is None:
            ttft = max([wanted.ttft_ms, *_own_ttfts(traffic)])
            tpot = None
        if outcome.percentile("ttft_ms", 0.95, tenant, after_s) > ttft:
            return False
        if tpot is not None and outcome.percentile("tpot_ms", 0.95, tenant, after_s) > tpot:
            return False
    # Work that is left when the last request has come is a queue that grew.
    last = max(answer.at_s for answer in outcome.answers)
    longest = max(r.output_tokens for r in traffic.requests)
    drain_s = outcome.seconds - (last - traffic.requests[0].at_s)
    return drain_s <= wanted.ttft_ms / 1e3 + 2 * longest * outcome.mean_step_ms / 1e3


def document_of(plan: Plan) -> dict[str, Any]:
    """As `--json` prints it."""
    settings, outcome, curve = plan.settings, plan.expected, plan.curve
    after_s = _SETTLING * plan.played_s
    traffic = plan.traffic

    def quantiles(tenant: str | None) -> Mapping[str, float]:
        return {
            f"{name}_p{part}_ms": round(outcome.percentile(f"{name}_ms", part / 100, tenant, after_s), 2)
            for name in ("ttft", "tpot")
            for part in (50, 95)
        }

    tenants: dict[str, int] = {}
    for request in traffic.requests:
        tenants[request.tenant] = tenants.get(request.tenant, 0) + 1
    shown = sorted(tenants, key=lambda name: -tenants[name])[:50]
    total = plan.tokens_per_s * (1 + traffic.prompt_tokens_per_s / traffic.output_tokens_per_s)
    return {
        "gpu": curve.gpu.name,
        "model": curve.shape.name,
        "weights_gib": round(curve.shape.weight_bytes / GIB, 2),
        "curve": {"measured": curve.is_measured, "origin": curve.origin},
        "traffic": {
            "tenants": len(tenants),
            "adapters": len(traffic.ranks),
            "requests_per_s": round(traffic.requests_per_s, 3),
            "prompt_tokens_per_s": round(traffic.prompt_tokens_per_s, 1),
            "output_tokens_per_s": round(traffic.output_tokens_per_s, 1),
        },
        "played": {
            "requests": len(plan.played.requests),
            "workers": plan.workers // plan.cells,
            "is_small_sample": plan.is_small_sample,
        },
        "workers": plan.workers,
        "gpus_a_worker": curve.shape.ranks,
        "keeps_objectives": plan.holds,
        "sequence_slots": settings.slots,
        "arena": {
            "gib": round(arena_bytes(curve) / GIB, 2),
            "kv_mb": settings.kv_tokens * curve.shape.kv_token_bytes // _MIB,
            "kv_tokens": settings.kv_tokens,
            "state_tokens": curve.shape.state_tokens,
            "device_adapter_mb": settings.adapter_bytes // _MIB,
            "host_adapter_mb": _host_mib(plan),
            "adapters_resident": plan.adapters_resident,
        },
        "expected": {
            **quantiles(None),
            "tokens_per_s": round(plan.tokens_per_s, 1),
            "busy_share": round(outcome.busy_share, 3),
            "mean_batch": round(outcome.mean_rows, 2),
            "mean_step_ms": round(outcome.mean_step_ms, 3),
            "peak_kv_tokens": outcome.peak_kv_tokens,
            "loads_a_minute": round(outcome.loads * plan.cells * 60 / plan.played_s, 1),
            "evictions_a_minute": round(outcome.evictions * plan.cells * 60 / plan.played_s, 1),
        },
        "tenants": {tenant: quantiles(tenant) for tenant in shown},
        "cost": {
            "gpu_hour": plan.wanted.gpu_hour,
            "hour": _rounded(plan.hour),
            "million_output_tokens": _rounded(plan.million(plan.tokens_per_s)),
            "million_tokens": _rounded(plan.million(total)),
        },
        "rules": [{"rule": rule.name, "act": rule.act, "says": rule.says} for rule in plan.rules],
        "worker_flags": flags_of(plan),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _host_mib(plan: Plan) -> int:
    """What all adapters take, as far as the host has room."""
    listed = {**plan.traffic.listed, **plan.traffic.ranks}
    all_bytes = sum(listed.values()) * plan.curve.shape.rank_bytes
    return max(1, min(plan.host_bytes, int(1.05 * all_bytes)) // _MIB)


def flags_of(plan: Plan) -> str:
    """Without adapters the arena's part for them stays the least that a worker takes."""
    ranks = [*plan.traffic.ranks.values(), *plan.traffic.listed.values()]
    parts = [f"--sequence-slots {plan.settings.slots}"]
    if plan.curve.shape.quantization != "none":
        parts.append(f"--quantization {plan.curve.shape.quantization}")
    if plan.curve.shape.ranks > 1:
        parts.append(f"--tensor-parallel {plan.curve.shape.ranks}")
    if plan.curve.shape.kv_element_bytes == 1:
        parts.append("--kv-cache-dtype fp8")
    block_tokens = plan.curve.shape.block_tokens(max(ranks, default=RANKS_AT_ONCE))
    if block_tokens != BLOCK_TOKENS:
        parts.append(f"--block-size {block_tokens}")
    if ranks:
        parts += [
            f"--device-adapter-mb {max(1, plan.settings.adapter_bytes // _MIB)}",
            f"--host-adapter-mb {_host_mib(plan)}",
            f"--max-lora-rank {max(ranks)}",
        ]
    return " ".join(parts)
