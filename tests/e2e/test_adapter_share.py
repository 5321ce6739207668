"""The adapter cache through real services (fake engine): a tenant that cycles many adapters beside one that uses two,
and a pin that a restarted worker keeps without a request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from manylora.client import Client, ClusterStatus, RequestFailed, TenantAdapters
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

DEVICE_ADAPTERS, HOST_ADAPTERS = 8, 16
"""Adapters of the fake engine take a MiB each."""
CYCLED = 40
MIB = 1 << 20


@asynccontextmanager
async def small_cache(folder: Path) -> AsyncIterator[tuple[LocalCluster, Client]]:
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=folder / "data",
        worker_module="manylora_sim.worker",
        worker_flags=(
            "--fake-step-ms=2",
            f"--device-adapter-mb={DEVICE_ADAPTERS}",
            f"--host-adapter-mb={HOST_ADAPTERS}",
        ),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as client:
        for tenant in ("cycler", "steady"):
            await client.tenants.apply(f"tenant_id: {tenant}\n")
        names = [("cycler", f"c{i}") for i in range(CYCLED)] + [("steady", f"s{i}") for i in range(3)]
        for tenant, name in names:
            await client.adapters.add(tenant, name, _adapter(folder / f"{tenant}-{name}"))
        yield cluster, client


def _adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    return folder


async def _ask(client: Client, tenant: str, adapter: str) -> None:
    async with client.generate([5, 6, 7], tenant=tenant, adapter=adapter, max_tokens=2, ignore_eos=True) as stream:
        async for _ in stream:
            pass


def _of(status: ClusterStatus, tenant: str) -> TenantAdapters | None:
    return next((each for each in status.scheduler.adapters if each.tenant_id == tenant), None)


async def _until(client: Client, tenant: str, is_so: Callable[[TenantAdapters], bool]) -> TenantAdapters:
    """The tenant's adapters in the status, once they are as they should be."""
    async with asyncio.timeout(30):
        while True:
            found = _of(await client.status(), tenant)
            if found is not None and is_so(found):
                return found
            await asyncio.sleep(0.05)


async def test_who_cycles_many_adapters_loses_its_own_and_nobody_elses(tmp_path: Path) -> None:
    async with small_cache(tmp_path) as (_, client):
        for name in ("s0", "s1"):
            await _ask(client, "steady", name)
        begun = await _until(client, "cycler", lambda t: True)
        for round_ in range(3):
            callers = [_ask(client, "cycler", f"c{i}") for i in range(CYCLED)]
            await asyncio.gather(*callers, *(_ask(client, "steady", f"s{i % 2}") for i in range(4)))
            print(f"round {round_}: {_of(await client.status(), 'cycler')}")
        cycler = await _until(client, "cycler", lambda t: t.evictions >= begun.evictions + 2 * CYCLED)
        # s2 is on the device since it was registered: its first step was tried there.
        steady = await _until(client, "steady", lambda t: t.device_bytes == 3 * MIB)
        assert (steady.evictions, steady.displaced) == (0, 0), "its adapters stayed on the device"
        assert cycler.displaced == begun.displaced, "its own went for its own"
        assert cycler.device_bytes == (DEVICE_ADAPTERS - 3) * MIB, "what the other does not want is borrowed"


async def test_a_pin_is_kept_over_a_workers_restart_and_ends_with_the_policy(tmp_path: Path) -> None:
    async with small_cache(tmp_path) as (cluster, client):
        pins = ", ".join(f"c{i}" for i in range(DEVICE_ADAPTERS))
        with pytest.raises(RequestFailed, match=r"line 2: the pinned adapters take 8388608 bytes"):
            await client.tenants.apply(f"tenant_id: cycler\nadapters: {{pin: [{pins}]}}\n")
        await client.tenants.apply("tenant_id: steady\nadapters: {pin: [s2, later]}\n")
        steady = await _until(client, "steady", lambda t: bool(t.pins) and t.pins[0].on_device == 1)
        assert [(pin.name, pin.workers, pin.problem) for pin in steady.pins] == [
            ("s2", 1, ""),
            ("later", 1, "no adapter has this name"),
        ]
        os.kill(cluster.pids["worker-0"], signal.SIGKILL)
        async with asyncio.timeout(60):
            while _of(await client.status(), "steady") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        steady = await _until(client, "steady", lambda t: bool(t.pins) and t.pins[0].on_device == 1)
        assert (steady.device_bytes, steady.evictions) == (MIB, 0), "nobody asked for it"
        await asyncio.gather(*(_ask(client, "cycler", f"c{i}") for i in range(CYCLED)))
        assert (await _until(client, "steady", lambda t: True)).pins[0].on_device == 1
        await client.adapters.add("steady", "later", _adapter(tmp_path / "later"))
        await _until(client, "steady", lambda t: [pin.on_device for pin in t.pins] == [1, 1])
        await client.tenants.apply("tenant_id: steady\n")
        await _until(client, "steady", lambda t: not t.pins)
