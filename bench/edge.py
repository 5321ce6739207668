"""What strangers without a key, and one tenant's key, cost everybody else at one router.

Real processes on loopback: etcd, scheduler, router, one worker. A steady interactive victim alone, then beside each
assault from a process of its own:

    large-messages    32 at a time, without a key, of 3.8 MB that would be 1.9 M chat messages
    large-messages-with-a-key   the same with a tenant's key
    crowded-messages  32 at a time, with the key, of a request's size and 500,000 chat messages
    half-messages     4,000 calls with the key and all but the end of a message of 1 MiB
    calls             64 closed loops of small calls without a key
    storm             4,000 such calls under way at any time, each again when it was refused
    long-metadata     64 closed loops, each with another key of 14 kB
    unread            16,600 calls without a key that are never read
    open-calls        16,600 calls of one tenant's key
    uploads           64 uploads of one tenant's key that send no file
    admin-calls       64 closed loops of one tenant's key that list its adapters
    health            4,000 watches and 64 loops of checks, which need no key
    connections       1,000 connections with half an HTTP/2 preface; each again when it was cut off
    idle-connections  24,000 whole ones that answer what keeps them alive
    http-connections  1,000 with half an HTTP request
    http-bodies       32 at a time of 4 MB that are announced without a key

Prints a JSON line for each: the victim's times and failures, the router's CPU seconds a second and its memory before,
at most and 3 s after, how the assault's calls ended and how many a second, and beside `uploads` how long another
tenant's adapter took to be added.

    python bench/edge.py [--device cuda --model FOLDER] [--assaults calls,unread] [--seconds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from manylora.client import Client, RequestFailed
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds what stands beside it as well
from bench.edge_traffic import ASSAULTS, assault_process
from bench.isolation import emit, quantile
from bench.isolation_traffic import Target, Victim, victim

VICTIM, GREEDY = "victim", "greedy"
STREAMS, PERIOD_S = 4, 0.5
CALM_S = 3.0  # behind an assault
SAMPLE_S = 0.1


@dataclass
class Router:
    """What the router's process takes while it is watched."""

    process: psutil.Process
    peak_mib: float = 0.0

    @property
    def mib(self) -> float:
        return float(self.process.memory_info().rss) / (1 << 20)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    async def watch(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, self.mib)
            await asyncio.sleep(SAMPLE_S)


@dataclass(frozen=True)
class Bench:
    cluster: LocalCluster
    client: Client
    greedy_key: str
    seconds: float

    async def victim(self, seed: int) -> Victim:
        target = Target(self.cluster.router, read_key(self.cluster.key_file), VICTIM, "interactive")
        return await victim(target, STREAMS, PERIOD_S, self.seconds, seed, 0)

    async def beside(self, name: str, seed: int) -> dict[str, object]:
        router = Router(psutil.Process(self.cluster.pids["router-0"]))
        before_mib = router.mib
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        given = (name, self.cluster.router, self.cluster.http_addresses[0], self.greedy_key, there)
        child = spawn.Process(target=assault_process, args=given, daemon=True)
        child.start()
        there.close()
        watching = asyncio.create_task(router.watch())
        try:
            await asyncio.sleep(self.seconds / 2 + 1.0)  # until it is in full swing
            cpu_s, began = router.cpu_s, time.perf_counter()
            found = await self.victim(seed)
            cpu_share = (router.cpu_s - cpu_s) / (time.perf_counter() - began)
            added_s = await self._add_adapter(name) if name == "uploads" else None
            here.send("stop")
            outcomes: dict[str, int] = await asyncio.to_thread(here.recv)
        finally:
            watching.cancel()
            child.kill()
            await asyncio.to_thread(child.join)
        await asyncio.sleep(CALM_S)
        return {
            **seen(found),
            "router_cpu": cpu_share,
            "router_mib_before": before_mib,
            "router_mib_peak": router.peak_mib,
            "router_mib_after": router.mib,
            "others_adapter_added_s": added_s,
            "outcomes": outcomes,
        }

    async def _add_adapter(self, name: str) -> float:
        began = time.perf_counter()
        await self.client.adapters.add(VICTIM, f"beside-{name}", adapter_folder("words"))
        return time.perf_counter() - began


def seen(found: Victim) -> dict[str, object]:
    return {
        "victim_requests": len(found.ttft_ms),
        "victim_unanswered": found.unanswered,
        "victim_failed": dict(found.failed),
        "victim_ttft_p50_ms": quantile(found.ttft_ms, 0.5),
        "victim_ttft_p95_ms": quantile(found.ttft_ms, 0.95),
    }


@asynccontextmanager
async def bench_cluster(arguments: argparse.Namespace) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=arguments.model / "model" if arguments.model else BASE_FOLDER,
            model_name=arguments.model.name if arguments.model else BASE_NAME,
            data=Path(data),
            device=arguments.device,
            http_port=0,
        )
        async with (
            LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running,
            Client(running.router) as client,
        ):
            for tenant in (VICTIM, GREEDY):
                await client.tenants.apply(f"tenant_id: {tenant}\n", timeout_s=10)
            greedy, _ = await client.keys.create(["generate", "admin"], tenant=GREEDY, name="greedy")
            yield Bench(running, client, greedy, arguments.seconds)


async def main() -> None:
    arguments = parse()
    async with bench_cluster(arguments) as bench:
        await bench.victim(0)  # what is slow once
        alone = await bench.victim(1)
        emit(arguments.json, "edge", assault="none", device=arguments.device, **seen(alone))
        for seed, name in enumerate(arguments.assaults):
            found = await bench.beside(name, seed + 2)
            emit(arguments.json, "edge", assault=name, device=arguments.device, **found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, help="a folder that bench/shapes.py has made, in place of the demo model")
    parser.add_argument("--assaults", default=",".join(ASSAULTS), help="comma-separated: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="that the victim is measured beside each")
    arguments = parser.parse_args()
    arguments.assaults = arguments.assaults.split(",")
    if unknown := sorted(set(arguments.assaults) - set(ASSAULTS)):
        parser.error(f"--assaults: {', '.join(unknown)} is none of {', '.join(ASSAULTS)}")
    return arguments


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except RequestFailed as failure:
        sys.exit(f"edge: {failure}")
