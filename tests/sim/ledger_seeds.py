"""Plays seeds of the simulated cluster until its ledgers have so many rows, and says what they came to.

    python -m tests.sim.ledger_seeds --requests 100000 --first 1000 --processes 2

In each seed processes of every kind are killed, stopped, cut off and paused. That each request has one row, with the
tokens that were settled and that its caller got, is checked in each (`books.check_ledger`). What becomes of rows behind
that, between a router's log and the sink, is for tests/router/test_shipping.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter

from tests.sim.test_cluster import play

_FEWEST_ROWS = 20  # of a seed
_TOLD_EACH = 100  # seeds


def counts_of(seed: int) -> Counter[str]:
    """Whatever a seed fails for, its rows do not count."""
    logging.disable(logging.CRITICAL)
    try:
        ledger = play(seed).result._cluster.ledger
    except Exception as error:
        print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
        return Counter({"failed_seeds": 1})
    found = Counter({"seeds": 1, "rows": len(ledger.rows), "left_open_by_a_dead_router": len(ledger.opened_rows)})
    for row in ledger.rows.values():
        found["settled_tokens"] += row.settled_tokens
        found["completion_tokens"] += row.completion_tokens
        found["resumed"] += bool(row.resumes)
        found["not_completed"] += row.outcome != "completed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    total, began = Counter[str](), time.monotonic()
    seeds = range(options.first, options.first + options.requests // _FEWEST_ROWS)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for found in pool.imap_unordered(counts_of, seeds):
            total += found
            if total["seeds"] % _TOLD_EACH == 0:
                print(json.dumps(total), file=sys.stderr, flush=True)
            if total["rows"] >= options.requests:
                break
        pool.terminate()
    print(json.dumps({**total, "wall_s": round(time.monotonic() - began, 1)}))
    sys.exit(1 if total["failed_seeds"] else 0)


if __name__ == "__main__":
    main()
