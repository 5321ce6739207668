"""What the usage ledger costs one router.

    row      CPU time of all threads for a row, in this process: opened, noted, closed, synced, read again from the log
             and put into SQLite. `cost` is that against a router's own CPU time for a request, measured beside
    router   tokens per second of a router's CPU, tokens/s and time to the first token, with a ledger and without: two
             clusters of fake workers stand side by side and are loaded in turn. For a quiet machine: on a busy one two
             equal clusters differ by a quarter

Prints JSON lines: {"bench": "ledger", "case", ...}.

    python -m bench.ledger [--only row] [--rounds 8] [--seconds 6] [--tokens 128] [--streams 64]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from manylora.client import Client
from manylora.client.credentials import read_key
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_router.ledger.ledger import Ledger
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import parse_prices
from manylora_shared.ledger.row import UsageRow
from manylora_shared.ledger_sinks.sqlite import SqliteSink
from manylora_shared.process.clock import SystemClock
from manylora_shared.transport.grpc_transport import GrpcTransport

from bench.hop import MODEL, TENANT, Measured, drive, emit, quantiles, through_router

PRICES = "name: p\ncurrency: EUR\nversions:\n- from: 2026-01-01\n  million_completion_tokens: 1\n"


@dataclass
class Case:
    running: LocalCluster
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    requests: int = 0


@asynccontextmanager
async def cluster(ledger: str, step_ms: float) -> AsyncIterator[LocalCluster]:
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=MODEL,
            model_name="fake",
            data=Path(data),
            worker_flags=(f"--fake-step-ms={step_ms}", "--sequence-slots=320", "--num-blocks=20000"),
            worker_module="manylora_sim.worker",
            ledger=ledger,
        )
        async with LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running:
            async with Client(running.router) as client:
                await client.tenants.apply(f"tenant_id: {TENANT}")
            yield running


async def measure(case: Case, streams: int, seconds: float, tokens: int, rng: random.Random) -> None:
    measured = Measured()
    router = psutil.Process(case.running.pids["router-0"])
    channel = GrpcTransport().connect(case.running.router)
    before = router.cpu_times()
    request = through_router(channel, read_key(case.running.key_file), tokens)
    took_s = await drive(request, streams, seconds, measured, rng)
    after = router.cpu_times()
    await channel.close()
    cpu_s = after.user + after.system - before.user - before.system
    case.tokens_per_cpu_s.append(measured.tokens / cpu_s)
    case.tokens_per_s.append(measured.tokens / took_s)
    case.ttft_ms += measured.ttft_ms
    case.requests += len(measured.ttft_ms)


def rows(count: int) -> Iterator[tuple[UsageRow, UsageRow]]:
    """As they are opened and closed."""
    for number in range(count):
        opened = UsageRow(
            request_id=f"{number:032x}",
            tenant="bench",
            key=f"{7:016x}",
            qos_class="standard",
            model="fake",
            router="router-0",
            trace_id=f"{9:032x}",
            began_unix_s=time.time(),
        )
        yield (
            opened,
            opened._replace(
                outcome="completed",
                prompt_tokens=64,
                completion_tokens=128,
                kv_byte_seconds=10**9,
                decode_flops=10**12,
                queue_ms=1.5,
                ttft_ms=20.25,
                duration_ms=512.125,
                ended_unix_s=time.time(),
            ),
        )


async def row_cpu_us(count: int, per_turn: int) -> float:
    """Of the whole process, for each row; `per_turn`: between two turns of the event loop."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(
            Path(folder) / "log",
            SqliteSink(Path(folder) / "usage.sqlite"),
            router_id="router-0",
            instance="bench",
            clock=SystemClock(),
            served=lambda pool: Served(),
            prices=parse_prices(PRICES),
            max_bytes=1 << 30,
        )
        await ledger.start()
        began_s = time.process_time()
        for number, (opened, closed) in enumerate(rows(count)):
            ledger.open(opened, lambda: (64, 0, 100, 0, 0))
            ledger.close(closed)
            if number % per_turn == 0:
                await asyncio.sleep(0.01)
        await ledger.flush()
        await ledger.stop()
        return (time.process_time() - began_s) / count * 1e6


async def request_cpu_us(options: argparse.Namespace) -> float:
    async with cluster("none", options.step_ms) as running:
        case = Case(running)
        for seconds in (1.0, options.seconds):
            await measure(case, options.streams, seconds, options.tokens, random.Random(7))
    return float(options.tokens) / case.tokens_per_cpu_s[-1] * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, in the mean")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--only", default="", help="a case alone: row or router")
    options = parser.parse_args()
    if options.only in ("", "row"):
        row_us = statistics.median([await row_cpu_us(6_000, 20) for _ in range(3)])
        request_us = await request_cpu_us(options)
        emit(
            "ledger",
            case="row",
            tokens_each=options.tokens,
            row_cpu_us=row_us,
            request_cpu_us=request_us,
            cost=row_us / request_us,
        )
    if options.only in ("", "router"):
        await routers(options)


async def routers(options: argparse.Namespace) -> None:
    rng = random.Random(7)
    async with AsyncExitStack() as stack:
        cases = {
            name: Case(await stack.enter_async_context(cluster(place, options.step_ms)))
            for name, place in (("with", ""), ("without", "none"))
        }
        for case in cases.values():
            await measure(Case(case.running), options.streams, 1.0, options.tokens, rng)
        for number in range(options.rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                await measure(cases[name], options.streams, options.seconds, options.tokens, rng)
    ratios = [
        one / other
        for one, other in zip(cases["with"].tokens_per_cpu_s, cases["without"].tokens_per_cpu_s, strict=True)
    ]
    told: dict[str, object] = {}
    for name, case in cases.items():
        p50, p99 = quantiles(case.ttft_ms)
        told |= {
            f"{name}_tokens_per_cpu_s": statistics.median(case.tokens_per_cpu_s),
            f"{name}_tokens_per_s": statistics.median(case.tokens_per_s),
            f"{name}_ttft_ms_p50": p50,
            f"{name}_ttft_ms_p99": p99,
            f"{name}_requests": case.requests,
        }
    cost = 1 - statistics.median(ratios)
    emit(
        "ledger",
        case="router",
        tokens_each=options.tokens,
        streams=options.streams,
        rounds=options.rounds,
        cost=cost,
        **told,
    )


if __name__ == "__main__":
    asyncio.run(main())
