"""`manylora up` with the demo model, four tenants with their adapters and keys, and a load on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora.client import Client, RequestFailed, Sampling
from manylora.demo import measure, skills

START_TIMEOUT_S = 180.0
STREAMS_A_TENANT = 3
CLASSES = ("interactive", "standard", "batch")
WEIGHTS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Served:
    router: str
    url: str
    operator_key: str
    keys: dict[str, str]  # by tenant

    @property
    def tenants(self) -> list[str]:
        return list(self.keys)


@contextlib.contextmanager
def served(folder: Path, *, log: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "manylora", "up", "--model", "demo", "--workers", "2", "--port", "0"]
    command += [
        "--http-port",
        "0",
        "--data",
        str(folder),
        "--kv-cache-mb",
        "16",
        "--sequence-slots",
        "4",
        "--device-adapter-mb",
        "8",
    ]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline() if readable else b""
            assert line, f"not ready:\n{log.read_text()}"
            ready = json.loads(line)
            yield asyncio.run(_set_up(ready))
        finally:
            process.terminate()
            process.wait(30)


async def _set_up(ready: dict[str, str]) -> Served:
    async with Client(ready["router"]) as client:
        await measure.set_up(client)
        for tenant, weight in zip(measure.TENANTS, WEIGHTS, strict=True):
            classes = "".join(f"  {each}: {{weight: {weight}}}\n" for each in CLASSES)
            await client.tenants.apply(f'tenant_id: "{tenant.tenant}"\nclasses:\n{classes}')
        keys = {
            each.tenant: (await client.keys.create(["generate", "admin"], tenant=each.tenant))[0]
            for each in measure.TENANTS
        }
        operator = (await client.keys.create(["operator", "gateway"]))[0]
    return Served(ready["router"], f"http://{ready['http']}", operator, keys)


@contextlib.contextmanager
def load(cluster: Served, streams: int = STREAMS_A_TENANT) -> Iterator[None]:
    """Until it is left. A request that fails is no matter here."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_load(cluster, stop, streams)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


async def _load(cluster: Served, stop: threading.Event, streams: int) -> None:
    async def ask(client: Client, tenant: measure.DemoTenant, number: int) -> None:
        for text in itertools.cycle(skills.held_out_inputs(number, 40)):
            if stop.is_set():
                return
            with contextlib.suppress(RequestFailed):
                await client.complete(
                    skills.prompt(text),
                    adapter=tenant.skill.adapter,
                    qos_class=CLASSES[number % 3],
                    max_tokens=48 + 40 * (number % 3),
                    ignore_eos=True,
                    sampling=Sampling(temperature=0.5),
                )

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for tenant in measure.TENANTS:
            client = await stack.enter_async_context(Client(cluster.router, key=cluster.keys[tenant.tenant]))
            for number in range(streams):
                group.create_task(ask(client, tenant, number))
