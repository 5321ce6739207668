"""64 streams at once for `--soak-seconds`, half over gRPC and half over HTTP: cancels, disconnects, slow readers and
adapter churn all the while.

Every request ends with exactly one outcome. After a quarter of the time and at its end all callers go away; what the
services then hold is compared: memory, threads, descriptors, sockets, tasks of event loops, and series of metrics.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import re
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
from manylora.client import Client, Finished, RequestFailed, Sampling
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.load.endpoint import events
from manylora.local.cluster import ClusterOptions, LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 64
TENANTS = ("ash", "birch", "cedar")
SKILLS = ("json", "reverse", "upper", "words")
NAMES = ("one", "two", "three", "four")
BEHAVIOURS = (("read", "cancel", "disconnect", "slow", "deadline"), (60, 15, 8, 7, 10))
EXPECTED_CODES = ("NOT_FOUND", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION")
"""An adapter that is not (any more) there, a deadline too short, an adapter that went between admission and load."""
EXPECTED_STATUSES = (400, 404, 503, 504)
EXPECTED_LABELS = ("adapter_failed", "adapter_not_found", "deadline_exceeded", "not_found", "overloaded")
GROWTH_BYTES = 48 << 20
"""How much a process may hold more at the end than after the first quarter: allocator noise, not a leak per request."""
GROWTH = {"threads": 8, "descriptors": 16, "sockets": 8, "tasks": 8, "series": 150}
"""Of series: an outcome or a size that comes for the first time brings some."""


@dataclass(frozen=True)
class Footprint:
    memory_bytes: int
    threads: int
    descriptors: int
    sockets: int
    tasks: int
    series: int


class Load:
    """The callers, and what became of each of their requests."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._rng = rng
        self._grpc = cluster.router_addresses
        self._http = [f"http://{address}/v1/completions" for address in cluster.http_addresses]
        self._key = read_key(cluster.key_file)

    async def run(self, client: Client, until: float) -> None:
        async with asyncio.TaskGroup() as callers:
            for number in range(STREAMS):
                callers.create_task(self._grpc_caller(until) if number % 2 else self._http_caller(until))
            callers.create_task(self._churn(client, until))

    async def _grpc_caller(self, until: float) -> None:
        """One stream after the other, on a connection that is dropped now and then."""
        while time.monotonic() < until:
            async with Client(self._rng.choice(self._grpc), retry=None) as client:
                for _ in range(self._rng.randint(1, 12)):
                    if time.monotonic() >= until or not await self._over_grpc(client):
                        break

    async def _http_caller(self, until: float) -> None:
        while time.monotonic() < until:
            async with aiohttp.ClientSession() as session:
                for _ in range(self._rng.randint(1, 12)):
                    if time.monotonic() >= until or not await self._over_http(session):
                        break

    async def _over_grpc(self, client: Client) -> bool:
        """One request. False where the caller drops its connection in mid-stream."""
        rng = self._rng
        behaviour = rng.choices(*BEHAVIOURS)[0]
        stream = client.generate(
            self._prompt(),
            tenant=rng.choice(TENANTS),
            adapter=rng.choice(("", *NAMES)),
            qos_class=rng.choice(("interactive", "standard", "batch")),
            max_tokens=rng.choice((4, 16, 64)),
            n=rng.choice((1, 1, 1, 3)),
            sampling=Sampling(temperature=rng.choice((0.0, 1.0))),
            ignore_eos=True,
            timeout_s=rng.uniform(0.05, 0.5) if behaviour == "deadline" else 60.0,
        )
        finished = []
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    finished.append(event)
                elif behaviour == "slow":
                    await asyncio.sleep(rng.uniform(0, 0.2))
                elif behaviour == "cancel" and rng.random() < 0.3:
                    stream.cancel()
                    self.outcomes["gRPC: cancelled by the caller"] += 1
                    return True
                elif behaviour == "disconnect" and rng.random() < 0.3:
                    self.outcomes["gRPC: disconnected by the caller"] += 1
                    return False
        except RequestFailed as failure:
            # They ask for more than two workers do in time, so overload control may refuse them. Nothing else may
            # be exhausted: no quota is set, and no reader is slow enough to be cut off.
            is_overload = failure.reason == "OVERLOADED"
            if len(finished) > 1 or (failure.code not in EXPECTED_CODES and not is_overload):
                raise
            self.outcomes[f"gRPC: {failure.code}"] += 1
        else:
            assert [f.outcome for f in finished] == ["completed"]
            self.outcomes["gRPC: completed"] += 1
        return True

    async def _over_http(self, session: aiohttp.ClientSession) -> bool:
        rng = self._rng
        behaviour = rng.choices(*BEHAVIOURS)[0]
        body = {
            "model": rng.choice((BASE_NAME, *NAMES)),
            "prompt": self._prompt(),
            "max_tokens": rng.choice((4, 16, 64)),
            "n": rng.choice((1, 1, 1, 3)),
            "temperature": rng.choice((0.0, 1.0)),
            "ignore_eos": True,
            "stream": behaviour != "read" or rng.random() < 0.7,
        }
        headers = {
            "authorization": f"Bearer {self._key}",
            "x-tenant-id": rng.choice(TENANTS),
            "x-request-class": rng.choice(("interactive", "standard", "batch")),
        }
        seconds = rng.uniform(0.05, 0.5) if behaviour == "deadline" else 60.0
        try:
            async with (
                asyncio.timeout(seconds),
                session.post(rng.choice(self._http), json=body, headers=headers) as answer,
            ):
                if answer.status != 200:
                    assert answer.status in EXPECTED_STATUSES, await answer.text()
                    self._failed((await answer.json())["error"]["code"])
                elif not body["stream"]:
                    assert len((await answer.json())["choices"]) == body["n"]
                    self.outcomes["HTTP: completed"] += 1
                else:
                    return await self._read(answer, behaviour)
        except TimeoutError:
            assert behaviour == "deadline"
            self.outcomes["HTTP: left at its deadline"] += 1
        return True

    async def _read(self, answer: aiohttp.ClientResponse, behaviour: str) -> bool:
        ends = []
        async for data in events(answer.content):
            if data == b"[DONE]" or b'"error":' in data:
                ends.append(data)
            elif behaviour == "slow":
                await asyncio.sleep(self._rng.uniform(0, 0.2))
            elif behaviour in ("cancel", "disconnect") and self._rng.random() < 0.3:
                self.outcomes[f"HTTP: {behaviour}"] += 1
                answer.close()  # HTTP/1.1 has no other way
                return behaviour == "cancel"
        errors = [json.loads(data)["error"]["code"] for data in ends if data != b"[DONE]"]
        if errors:
            assert len(errors) == 1
            self._failed(errors[0])
        else:
            assert ends == [b"[DONE]"]
            self.outcomes["HTTP: completed"] += 1
        return True

    def _failed(self, label: str) -> None:
        assert label in EXPECTED_LABELS, label
        self.outcomes[f"HTTP: {label}"] += 1

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(0, 256) for _ in range(self._rng.choice((2, 9, 40, 150)))]

    async def _churn(self, client: Client, until: float) -> None:
        """Adapters come and go while they are asked for."""
        while time.monotonic() < until:
            tenant, name = self._rng.choice(TENANTS), self._rng.choice(NAMES)
            try:
                if self._rng.random() < 0.4:
                    await client.adapters.remove(tenant, name)
                else:
                    await client.adapters.add(tenant, name, adapter_folder(self._rng.choice(SKILLS)))
            except RequestFailed as failure:
                if failure.code != "NOT_FOUND":
                    raise
            await asyncio.sleep(self._rng.uniform(0.05, 0.4))


async def test_soak(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path,
        workers=2,
        routers=2,
        http_port=0,
        worker_flags=("--num-blocks=160", "--sequence-slots=24", "--device-adapter-mb=1", "--host-adapter-mb=1.4"),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as client:
        for tenant in TENANTS:
            await client.tenants.apply(f"tenant_id: {tenant}")
        load, began = Load(cluster, random.Random(1)), time.monotonic()
        await load.run(client, began + seconds / 4)
        early = await settled(cluster, client)
        await load.run(client, began + seconds)
        late = await settled(cluster, client)
        starts = {name: child.starts for name, child in cluster.children.items()}
    for name in late:
        print(json.dumps({"bench": "soak", "process": name, "early": asdict(early[name]), "late": asdict(late[name])}))
    print(json.dumps({"bench": "soak", "seconds": seconds, "outcomes": dict(sorted(load.outcomes.items()))}))
    assert set(starts.values()) == {1}, f"a process died: {starts}"
    for front in ("gRPC", "HTTP"):
        assert load.outcomes[f"{front}: completed"] > seconds / 2
    for name, found in late.items():
        before = asdict(early[name])
        assert found.memory_bytes <= before["memory_bytes"] + GROWTH_BYTES, f"{name} grew: {before} -> {found}"
        for what, growth in GROWTH.items():
            assert asdict(found)[what] <= before[what] + growth, f"{name} has more {what}: {before} -> {found}"


async def settled(cluster: LocalCluster, client: Client) -> dict[str, Footprint]:
    """By process, when no service holds anything of any request, and connections have had time to go."""
    async with asyncio.timeout(30):
        while not await is_empty(client):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await asyncio.sleep(6.0)
    return {name: await asyncio.to_thread(footprint, cluster, name) for name in cluster.pids}


async def is_empty(client: Client) -> bool:
    status = await client.status()
    flows = [flow for flow in status.scheduler.flows if flow.queued or flow.running]
    workers = [w for w in status.workers if w.running or w.kv_blocks_free != w.kv_blocks_total]
    return not flows and not workers


def footprint(cluster: LocalCluster, name: str) -> Footprint:
    process = psutil.Process(cluster.pids[name])
    text = ""
    if name in cluster.metrics_addresses:
        with urllib.request.urlopen(f"http://{cluster.metrics_addresses[name]}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    tasks = re.search(r"^event_loop_tasks (\S+)$", text, re.MULTILINE)
    live = re.search(r"^live_requests (\S+)$", text, re.MULTILINE)
    assert live is None or float(live[1]) == 0
    return Footprint(
        memory_bytes=process.memory_info().rss,
        threads=process.num_threads(),
        descriptors=process.num_fds(),
        sockets=len(process.net_connections("tcp")),
        tasks=int(float(tasks[1])) if tasks else 0,
        series=sum(not line.startswith("#") for line in text.splitlines()),
    )
