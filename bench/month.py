"""A month of simulated traffic as a usage ledger, to read bills of: tenants by Zipf's law, days and nights, prefixes
that were found, requests that were left, adapters that had to be loaded, prices that change within the month.

    python -m bench.month FOLDER [--requests 60000]      writes FOLDER/usage.sqlite and FOLDER/prices.yaml
    manylora up --model MODEL --ledger sqlite:FOLDER/usage.sqlite --prices FOLDER/prices.yaml
    manylora usage report --month 2026-10 --csv bill.csv --html bill.html
"""

from __future__ import annotations

import argparse
import datetime
import math
import random
from collections.abc import Iterator
from pathlib import Path

from manylora_shared.ledger.compute import ModelShape
from manylora_shared.ledger.prices import PriceList, parse_prices
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger_sinks.sqlite import SqliteSink

MODEL = ModelShape(6_979_321_856, 525_336_576, attention=4 * 32 * 4096)
KV_TOKEN_BYTES, ADAPTER_BYTES = 131_072, 84_000_000  # an 8B model's, rank 16
TENANTS = ("aurora-travel", "birch-legal", "cedar-bank", "dune-games", "elm-health")
ADAPTERS = ("support", "summaries", "")
CLASSES = ("interactive", "standard", "batch")
BEGAN = datetime.datetime(2026, 10, 1, tzinfo=datetime.UTC).timestamp()
DAYS = 31
PRICES = """\
name: public
currency: EUR
versions:
- from: 2026-10-01
  million_prompt_tokens: 0.20
  million_cached_tokens: 0.05
  million_completion_tokens: 0.60
  gb_hour_kv: 0.01
  gb_hour_adapter: 0.02
  adapter_load: 0.0001
- from: 2026-10-16
  million_prompt_tokens: 0.18
  million_cached_tokens: 0.04
  million_completion_tokens: 0.54
  gb_hour_kv: 0.01
  gb_hour_adapter: 0.02
  adapter_load: 0.0001
"""


def rows(requests: int, prices: PriceList, rng: random.Random) -> Iterator[UsageRow]:
    weights = [1 / rank for rank in range(1, len(TENANTS) + 1)]
    for number in range(requests):
        tenant = rng.choices(TENANTS, weights)[0]
        yield prices.priced(_row(f"{number:032x}", tenant, _moment(rng), rng))


def _moment(rng: random.Random) -> float:
    """Noon has four times as much as midnight."""
    while True:
        at = rng.uniform(0, DAYS)
        if rng.random() < 0.625 - 0.375 * math.cos(2 * math.pi * at):
            return BEGAN + at * 86_400


def _row(request_id: str, tenant: str, ended: float, rng: random.Random) -> UsageRow:
    prompt = min(8_000, int(rng.lognormvariate(6, 0.8)) + 1)
    cached = prompt // 2 // 16 * 16 if rng.random() < 0.4 else 0
    asked = min(2_000, int(rng.lognormvariate(4.8, 0.7)) + 1)
    is_left = rng.random() < 0.03
    completion = rng.randrange(asked + 1) if is_left else asked
    adapter = rng.choices(ADAPTERS, (5, 3, 1))[0]
    seconds = 0.05 + 0.012 * asked
    return UsageRow(
        request_id,
        tenant,
        key=f"{tenant[:4]}{rng.randrange(2)}",
        qos_class=rng.choices(CLASSES, (3, 6, 2))[0],
        model="8b",
        adapter=adapter,
        adapter_version="1" if adapter else "",
        outcome="cancelled" if is_left else "completed",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        unread_tokens=min(2, asked - completion),
        kv_byte_seconds=int((prompt + completion) * KV_TOKEN_BYTES * seconds),
        adapter_byte_seconds=int(ADAPTER_BYTES * seconds / 4) if adapter else 0,
        adapter_loads=int(bool(adapter) and rng.random() < 0.05),
        prefill_flops=MODEL.prefill(prompt, cached),
        decode_flops=MODEL.decode(prompt, [completion]),
        ttft_ms=50.0,
        duration_ms=seconds * 1e3,
        began_unix_s=ended - seconds,
        ended_unix_s=ended,
    )


def write(folder: Path, requests: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prices.yaml").write_text(PRICES)
    sink = SqliteSink(folder / "usage.sqlite")
    sink.put(list(rows(requests, parse_prices(PRICES), random.Random(35))))
    sink.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=60_000)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.requests)
