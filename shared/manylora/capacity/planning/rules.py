"""What to turn at a cluster, and from which number on: each rule with this plan's figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from manylora_shared.merge_share import merged_workers

from manylora.capacity.planning.curve import Curve
from manylora.capacity.planning.play import Outcome
from manylora.capacity.planning.traffic import Traffic
from manylora.capacity.planning.worker import WorkerSettings

_MIB = 1 << 20
MOST_WAITING = 0.05  # of the requests, that may wait for their adapter
MOST_RANK_WASTE = 0.05  # of a step, that ranks above the median may take
MOST_KV = 0.9  # of the KV, that may be held at the worst moment
COVERED = 0.95  # of the requests, whose adapters should be on the device


@dataclass(frozen=True)
class Rule:
    """act: whether this traffic is beyond its threshold."""

    name: str
    act: bool
    says: str


def rules_of(
    curve: Curve,
    settings: WorkerSettings,
    traffic: Traffic,
    outcome: Outcome,
    workers: int,
    played_workers: int,
    played_s: float,
) -> list[Rule]:
    """outcome: of `played_workers`, over `played_s` of the traffic."""
    rules = [_kv(settings, outcome)]
    if traffic.uses:
        # What is quantized or shared takes no adapter into its weights.
        merges = curve.shape.quantization == "none" and curve.shape.ranks == 1
        rules = [
            _evictions(curve, settings, traffic, outcome, played_workers, played_s),
            *([_merge(curve, traffic, outcome, workers)] if merges else []),
            _rank_waste(curve, traffic, outcome),
            *rules,
        ]
    return rules


def _evictions(
    curve: Curve, settings: WorkerSettings, traffic: Traffic, outcome: Outcome, workers: int, played_s: float
) -> Rule:
    requests = len(outcome.answers)
    evictions = outcome.evictions * 60 / played_s / workers
    waiting = outcome.loads / requests
    allowed = MOST_WAITING * requests * 60 / played_s / workers
    size = curve.shape.rank_bytes * statistics.mean(traffic.ranks.values())
    device_ms = size / curve.load_device_mb_s / 1e3
    file_ms = device_ms + size / curve.load_host_mb_s / 1e3
    covered, seen, ranks = 0.0, 0, traffic.ranks
    total = sum(traffic.uses.values())
    for adapter, uses in traffic.uses.most_common():
        if seen >= COVERED * total:
            break
        covered += curve.shape.rank_bytes * ranks[adapter]
        seen += uses
    says = (
        f"{evictions:.0f} evictions a minute a worker; {waiting:.1%} of the requests wait for their adapter, "
        f"{device_ms:.0f} ms from host memory or {file_ms:.0f} from a file. Above {allowed:.0f} a minute a worker, "
        f"{MOST_WAITING:.0%} of the requests, raise --device-adapter-mb ({settings.adapter_bytes // _MIB:,}) or add "
        f"workers: {covered / workers / _MIB:,.0f} MiB a worker hold the adapters of {COVERED:.0%} of the requests"
    )
    return Rule("evictions", evictions > allowed, says)


def _merge(curve: Curve, traffic: Traffic, outcome: Outcome, workers: int) -> Rule:
    adapter, uses = traffic.uses.most_common(1)[0]
    share, threshold = uses / len(traffic.requests), 1 / workers
    rows = max(1, round(outcome.mean_rows))
    rank, context = traffic.ranks[adapter], rows * curve.context
    base = curve.step_ms(rows, context)
    one = curve.step_ms(rows, context, sum_ranks=rank, max_rank=rank)
    own = merged_workers(share, workers)
    verdict = f"give it {own} merged worker{'s' * (own > 1)} of its own (adapters.dedicated)" if own else "leave it"
    saved = f"{(one - base) / one:.0%} of a step of {rows} ({one:.2f} to {base:.2f} ms)"
    says = (
        f"{adapter} has {share:.1%} of the requests. Merged into the weights it saves {saved}, but its worker serves "
        f"nobody else: from {threshold:.0%} on it fills one of the {workers}; {verdict}"
    )
    return Rule("merge", own > 0, says)


def _rank_waste(curve: Curve, traffic: Traffic, outcome: Outcome) -> Rule:
    ranks = sorted(request.rank for request in traffic.requests if request.adapter)
    median, greatest = ranks[len(ranks) // 2], ranks[-1]
    rows = max(1, round(outcome.mean_rows))
    distinct = min(rows, len(traffic.ranks))
    context = rows * curve.context
    mean = statistics.mean(ranks)
    capped = statistics.mean(min(rank, median) for rank in ranks)
    now = curve.step_ms(rows, context, sum_ranks=round(mean * distinct), max_rank=greatest)
    least = curve.step_ms(rows, context, sum_ranks=round(capped * distinct), max_rank=median)
    waste = (now - least) / now
    above = sum(rank > median for rank in ranks) / len(ranks)
    says = (
        f"{above:.0%} of the requests have a rank above the median's {median}, up to {greatest}; they make a step of "
        f"{rows} {waste:.1%} longer for everybody ({least:.2f} to {now:.2f} ms). Above {MOST_RANK_WASTE:.0%} give them "
        f"a pool of their own (--pool), or train them at rank {median}"
    )
    return Rule("rank-waste", waste > MOST_RANK_WASTE, says)


def _kv(settings: WorkerSettings, outcome: Outcome) -> Rule:
    held = outcome.peak_kv_tokens / settings.kv_tokens
    says = (
        f"requests hold up to {outcome.peak_kv_tokens:,} of {settings.kv_tokens:,} tokens of KV ({held:.0%}) on one "
        f"worker. Above {MOST_KV:.0%} sequences are swapped to the host: give adapters less, or add a worker"
    )
    return Rule("kv", held > MOST_KV, says)
