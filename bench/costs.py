"""What a tenant costs on shared GPUs, and on one of its own: the table of docs/PLANNING.md, made by the planner.

Each tenant has an adapter of rank 16 and asks, in the mean, `--rate` times a second for 128 tokens on 256; how much
each asks falls by Zipf's law.

    python -m bench.costs --price H100=2.50 --price H200=3.50
"""

from __future__ import annotations

import argparse

import yaml
from manylora.capacity.files import packaged_curves, read_mix
from manylora.capacity.planning.curve import find_curve
from manylora.capacity.planning.plan import Plan, Wanted, plan
from manylora.capacity.planning.shapes import SHAPES, gpu_of
from manylora.capacity.planning.traffic import traffic_of_mix

MONTH_H = 730
SECONDS = 60
COLUMNS = (
    "tenants",
    "workers",
    "first token, p95",
    "tokens/s",
    "a million tokens out",
    "a tenant's month",
    "on a GPU of its own",
    "times",
)


def mix(tenants: int, rate: float) -> str:
    each = {
        "count": tenants,
        "tenant_zipf": 1.0,
        "adapters": ["own"],
        "rank": 16,
        "prompt_tokens": {"mean": 256, "cv": 0.7, "max": 2000},
        "output_tokens": {"mean": 128, "cv": 0.7, "max": 1000},
    }
    return yaml.safe_dump({"arrivals": {"rate": tenants * rate}, "duration_s": SECONDS, "tenants": {"t{n}": each}})


def planned(tenants: int, rate: float, gpu: str, price: float, shape: str) -> Plan:
    traffic = traffic_of_mix(read_mix(mix(tenants, rate), "the mix"), seconds=SECONDS, rank=16)
    curve = find_curve(packaged_curves(), gpu_of(gpu), SHAPES[shape])
    return plan(traffic, curve, Wanted(gpu_hour=price))


def row(tenants: int, gpu: str, made: Plan, price: float) -> str:
    month = price * MONTH_H
    shared = month * made.workers / tenants
    million = made.million(made.tokens_per_s)
    cells = (
        f"{tenants:,} on {gpu}",
        f"{made.workers}",
        f"{made.expected.percentile('ttft_ms', 0.95):.0f} ms",
        f"{made.tokens_per_s:,.0f}",
        f"{million:.2f}",
        f"{shared:,.2f}",
        f"{month:,.0f}",
        f"{month / shared:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", action="append", required=True, metavar="GPU=PRICE", help="of an hour")
    parser.add_argument("--tenants", default="10,100,1000,10000")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for tenants in map(int, arguments.tenants.split(",")):
        for each in arguments.price:
            gpu, _, price = each.partition("=")
            made = planned(tenants, arguments.rate, gpu, float(price), arguments.shape)
            print(row(tenants, gpu, made, float(price)), flush=True)


if __name__ == "__main__":
    main()
