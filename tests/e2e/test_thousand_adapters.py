"""1,000 adapters in a bucket, asked for by Zipf's law, over two workers that hold a few: every answer comes, and is its
adapter's. `pytest -m slow tests/e2e/test_thousand_adapters.py`; takes minutes.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from manylora.client import Client, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from safetensors.torch import load_file, save_file

from tests.s3_server import running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADAPTERS, REQUESTS, AT_ONCE = 1000, 3000, 24
KINDS = {"upper": "AB3", "reverse": "3ba"}
TENANTS = ("acme", "bolt", "crux", "dale")
GREEDY = Sampling(temperature=0.0)
PROMPT = "do:ab3="


def made(folder: Path, kind: str, number: int) -> Path:
    """A copy with bytes, and so a digest, of its own: too small a change for the answer."""
    target = folder / f"{kind}-{number}"
    target.mkdir(parents=True)
    (target / CONFIG_NAME).write_bytes((adapter_folder(kind) / CONFIG_NAME).read_bytes())
    tensors = load_file(adapter_folder(kind) / WEIGHTS_NAME)
    first = min(tensors)
    tensors[first] = tensors[first] + 1e-4 * number / ADAPTERS * torch.randn(
        tensors[first].shape, generator=torch.Generator().manual_seed(number)
    ).to(tensors[first].dtype)
    save_file(tensors, target / WEIGHTS_NAME)
    return target


async def test_none_fails(tmp_path: Path) -> None:
    rng = random.Random(1)
    with running(tmp_path) as server:
        server.make_bucket("store")
        size = sum(each.stat().st_size for each in adapter_folder("upper").iterdir())
        options = ClusterOptions(
            model=BASE_FOLDER,
            model_name=BASE_NAME,
            data=tmp_path / "data",
            workers=2,
            kv_cache_mb=64,
            adapter_store="s3://store/cluster",
            adapter_store_access=str(server.access_file()),
            host_adapter_mb=1 + 40 * size // (1 << 20),
            device_adapter_mb=1 + 16 * size // (1 << 20),
            adapter_cache_mb=1 + 200 * size // (1 << 20),
            start_timeout_s=120.0,
        )
        async with LocalCluster(options) as cluster:
            await cluster.wait_connected()
            key = cluster.key_file.read_text().strip()
            async with Client(cluster.router, key=key) as client:
                names = await registered(client, tmp_path / "made")
                await served(client, rng, names)
                status = await client.status()
                assert sum(w.adapters_found_store for w in status.workers) > ADAPTERS // 4
                assert len(status.workers) == 2


async def registered(client: Client, folder: Path) -> list[tuple[str, str, str]]:
    """Tenant, name and kind of each."""
    for tenant in TENANTS:
        await client.tenants.apply(f"tenant_id: {tenant}\n")
    names = [
        (TENANTS[number % len(TENANTS)], f"a{number}", list(KINDS)[number // len(TENANTS) % 2])
        for number in range(ADAPTERS)
    ]
    places = asyncio.Semaphore(4)

    async def add(number: int, tenant: str, name: str, kind: str) -> None:
        async with places:
            await client.adapters.add(tenant, name, made(folder, kind, number))

    await asyncio.gather(*(add(number, *each) for number, each in enumerate(names)))
    return names


async def served(client: Client, rng: random.Random, names: list[tuple[str, str, str]]) -> None:
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
    asked = iter(rng.choices(names, weights, k=REQUESTS))
    wrong: list[str] = []

    async def caller() -> None:
        for tenant, name, kind in asked:
            result = await client.complete(PROMPT, tenant=tenant, adapter=name, max_tokens=8, sampling=GREEDY)
            if not result.text.startswith(KINDS[kind]):
                wrong.append(f"{tenant}/{name}: {result.text!r}")

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    assert wrong == []
