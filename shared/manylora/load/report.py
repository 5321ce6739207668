"""What is told at the end, as a document and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from manylora.load.run import Run
from manylora.load.tally import Histogram, Tally, jain

PERCENTS = (50, 90, 95, 99)
LATE_MS = 10.0
BUSY_PART = 0.9


def document(run: Run, url: str) -> dict[str, Any]:
    """Times in ms, None where nothing was measured. `tokens_part` and `weight_part` say what of all tokens a tenant got
    and what it was entitled to; `fairness` is Jain's index of tokens by weight, and says something where all of them
    wanted more than they got.
    """
    mix, tallies, total = run.mix, run.tallies, run.total
    weights = sum(tenant.weight for tenant in mix.tenants)
    by_weight = [tallies[tenant.name].output_tokens / tenant.weight for tenant in mix.tenants]
    return {
        "load": {
            "url": url,
            "api": mix.api,
            "prompts": mix.prompts,
            "seed": mix.seed,
            "counted_s": round(run.counted_s, 3),
            "warmup_s": mix.warmup_s,
            "late_ms": _times(run.late),
            "cpu_part": round(run.cpu_part, 3),
        },
        "total": _row(total, run.counted_s),
        "fairness": _number(jain(by_weight)),
        "tenants": {
            tenant.name: {
                **_row(tallies[tenant.name], run.counted_s),
                "tokens_part": _part(tallies[tenant.name].output_tokens, total.output_tokens),
                "weight_part": _part(tenant.weight, weights),
            }
            for tenant in mix.tenants
        },
    }


def _row(tally: Tally, counted_s: float) -> dict[str, Any]:
    return {
        "requests": tally.sent,
        "completed": tally.completed,
        "errors": dict(tally.errors.most_common()),
        "requests_per_s": round(tally.completed / counted_s, 3),
        "prompt_tokens": tally.prompt_tokens,
        "cached_prompt_tokens": tally.cached_tokens,
        "output_tokens": tally.output_tokens,
        "output_tokens_per_s": round(tally.output_tokens / counted_s, 3),
        "counted_by_chunks": tally.by_chunks,
        "goodput_per_s": round(tally.good / counted_s, 3),
        "good_part": _part(tally.good, tally.sent),
        "ttft_ms": _times(tally.ttft),
        "tpot_ms": _times(tally.tpot),
        "itl_ms": _times(tally.itl),
        "e2e_ms": _times(tally.e2e),
    }


def _times(histogram: Histogram) -> dict[str, float] | None:
    if not histogram.count:
        return None
    found = {f"p{percent}": histogram.percentile(percent) for percent in PERCENTS}
    return {name: round(1e3 * value, 3) for name, value in {"mean": histogram.mean, **found}.items()}


def _part(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


COUNTS = ("tenant", "requests", "done", "good", "req/s", "tokens/s", "of tokens", "by weight")
TIMES = ("tenant", "TTFT p50", "p95", "p99", "ITL p50", "p99", "TPOT p50", "e2e p50", "p99")
MAX_ROWS = 50


def tables(found: dict[str, Any]) -> list[tuple[Sequence[str], list[Sequence[str]]]]:
    """Columns and rows of each; of many tenants those with the most tokens, and all together at the end."""
    tenants = sorted(found["tenants"].items(), key=lambda item: -item[1]["output_tokens"])
    kept = tenants[:MAX_ROWS]
    if len(tenants) > 1:
        kept.append((f"all {len(tenants)}", found["total"]))
    return [
        (columns, [(name, *cells(row)) for name, row in kept])
        for columns, cells in ((COUNTS, _counts), (TIMES, _latencies))
    ]


def _counts(row: dict[str, Any]) -> Sequence[str]:
    def part(what: str) -> str:
        return "-" if row.get(what) is None else f"{100 * row[what]:.1f} %"

    rates = (f"{row['requests_per_s']:.2f}", f"{row['output_tokens_per_s']:.0f}")
    shares = (part("tokens_part"), part("weight_part"))
    return (str(row["requests"]), str(row["completed"]), part("good_part"), *rates, *shares)


def _latencies(row: dict[str, Any]) -> Sequence[str]:
    asked = [("ttft", 50), ("ttft", 95), ("ttft", 99), ("itl", 50), ("itl", 99), ("tpot", 50), ("e2e", 50), ("e2e", 99)]
    times = [(row[f"{what}_ms"], f"p{percent}") for what, percent in asked]
    return ["-" if found is None else shown_ms(found[percent]) for found, percent in times]


def shown_ms(value: float) -> str:
    return f"{value / 1e3:.1f} s" if value >= 9_999.5 else f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms"


def remarks(found: dict[str, Any]) -> list[str]:
    """What somebody who reads the numbers has to know."""
    said = []
    load, total = found["load"], found["total"]
    if load["cpu_part"] > BUSY_PART:
        said.append(
            f"this process used {100 * load['cpu_part']:.0f} % of a core: the numbers may be its own; run several"
        )
    if load["late_ms"] is not None and load["late_ms"]["p99"] > LATE_MS:
        said.append(
            f"1 % of the requests were sent {shown_ms(load['late_ms']['p99'])} late and more, which is in their times"
        )
    if total["counted_by_chunks"]:
        said.append("the server tells no usage: tokens are events of its streams")
    said += [f"{count} x {error}" for error, count in total["errors"].items()]
    return said
