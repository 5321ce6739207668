"""Adapters in a bucket, served by a whole cluster of the demo's model: cold starts by tier, and Zipf's traffic; JSON.

    python -m bench.object_store [--adapters 1000] [--requests 2000] [--workers 2] [--streams 16] [--zipf 1.0]

A real S3 server (moto) holds the store. Every adapter has content of its own. First each of some is asked for once,
one at a time, with nothing on the workers' disks: from the store to the first token. Then `--requests` draw adapters by
Zipf's law, `--streams` at a time, of ten tenants, with room for `--resident` adapters on the device, four times as many
on the host and half of all on the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from manylora.client import Client, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.errors import ManyloraError
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from safetensors.numpy import load_file, save_file

from tests.s3_server import S3Server, running

TENANTS = 10
COLD = 50
PROMPT = "do:ab3="
_MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--resident", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--worker-flag", action="append", default=[], help="of the workers, e.g. --prefetch=no")
    return parser.parse_args()


class Traffic:
    def __init__(self, cluster: LocalCluster, adapters: int) -> None:
        key = cluster.key_file.read_text().strip()
        self.names = [f"t{each}" for each in range(TENANTS)]
        self.tenants = [Client(cluster.router, key=key, tenant=name) for name in self.names]
        self.adapters = adapters
        self.failed: Counter[str] = Counter()

    async def ask(self, adapter: int) -> float | None:
        """Milliseconds to the first token, from the caller's side."""
        began = time.perf_counter()
        sampling = Sampling(temperature=0.0)
        try:
            async with self.tenants[adapter % TENANTS].generate(
                PROMPT, adapter=f"a{adapter}", max_tokens=8, sampling=sampling
            ) as stream:
                first = None
                async for _ in stream:
                    first = first or 1e3 * (time.perf_counter() - began)
                return first
        except ManyloraError as error:
            self.failed[type(error).__name__ + ": " + str(error)[:80]] += 1
            return None

    async def add_all(self, folder: Path) -> None:
        """Each differs from the others by a factor near one."""
        weights = load_file(adapter_folder("words") / WEIGHTS_NAME)
        first = next(iter(weights))
        for name in self.names:
            await self.tenants[0].tenants.apply(f"tenant_id: {name}\n")
        turns = asyncio.Semaphore(4)

        async def add(number: int) -> None:
            async with turns:
                own = folder / str(number)
                own.mkdir()
                shutil.copy(adapter_folder("words") / CONFIG_NAME, own)
                save_file({**weights, first: weights[first] * (1 + number / 1e5)}, own / WEIGHTS_NAME)
                tenant = number % TENANTS
                await self.tenants[tenant].adapters.add(self.names[tenant], f"a{number}", own)
                shutil.rmtree(own)

        await asyncio.gather(*(add(number) for number in range(self.adapters)))


def quantiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"p{part}": round(ordered[min(len(ordered) - 1, len(ordered) * part // 100)], 1) for part in (50, 95, 99)}


async def forget_all(cluster: LocalCluster, data: Path, workers: int) -> None:
    """Whatever the workers have, on the disk too."""
    for worker in range(workers):
        cluster.children[f"worker-{worker}"].kill()
    shutil.rmtree(data / "adapter-cache" / "objects")
    await asyncio.sleep(2.0)  # the router is to see that they are gone
    await cluster.wait_connected()


async def measure(arguments: argparse.Namespace, server: S3Server, folder: Path) -> dict[str, object]:
    size_mb = sum(each.stat().st_size for each in adapter_folder("words").iterdir()) / _MIB
    resident_mb = max(1, round(arguments.resident * size_mb))
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=folder / "data",
        workers=arguments.workers,
        kv_cache_mb=64,
        adapter_store="s3://store/bench",
        adapter_store_access=str(server.access_file()),
        device_adapter_mb=resident_mb,
        host_adapter_mb=4 * resident_mb,
        adapter_cache_mb=max(1, round(arguments.adapters * size_mb / 2)),
        worker_flags=tuple(arguments.worker_flag),
    )
    cluster = LocalCluster(options)
    async with cluster:
        await cluster.wait_connected()
        traffic = Traffic(cluster, arguments.adapters)
        began = time.perf_counter()
        await traffic.add_all(folder)
        added_s = time.perf_counter() - began
        await forget_all(cluster, folder / "data", arguments.workers)
        await asyncio.gather(*(traffic.ask(0) for _ in range(8)))  # the first steps of all are slower
        cold = [await traffic.ask(number) for number in range(1, min(COLD, arguments.adapters))]
        chosen = random.Random(1).choices(
            range(arguments.adapters),
            weights=[1 / (rank + 1) ** arguments.zipf for rank in range(arguments.adapters)],
            k=arguments.requests,
        )
        turns = asyncio.Semaphore(arguments.streams)

        async def ask(adapter: int) -> float | None:
            async with turns:
                return await traffic.ask(adapter)

        began = time.perf_counter()
        times = await asyncio.gather(*(ask(adapter) for adapter in chosen))
        took_s = time.perf_counter() - began
        status = await traffic.tenants[0].status()
        counts = {
            tier: sum(getattr(worker, f"adapters_found_{tier}") for worker in status.workers)
            for tier in ("device", "host", "disk", "store")
        }
        for client in traffic.tenants:
            await client.close()
    return {
        "bench": "object_store",
        "machine": platform.processor() or platform.machine(),
        "adapters": arguments.adapters,
        "adapter_kib": round(size_mb * 1024),
        "workers": arguments.workers,
        "worker_flags": arguments.worker_flag,
        "add_ms": round(1e3 * added_s / arguments.adapters, 1),
        "cold_first_token_ms": quantiles([each for each in cold if each is not None]),
        "requests": arguments.requests,
        "failed": dict(traffic.failed),
        "requests_per_s": round(arguments.requests / took_s, 1),
        "ttft_ms": quantiles([each for each in times if each is not None]),
        "found": counts,
    }


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "s3").mkdir()
        with running(folder / "s3") as server:
            server.make_bucket("store")
            print(json.dumps(asyncio.run(measure(arguments, server, folder))))


if __name__ == "__main__":
    main()
