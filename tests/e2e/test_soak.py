"""64 streams at once for `--soak-seconds`: cancels, disconnects, slow readers and adapter churn all the while.

Every request ends with exactly one outcome; afterwards nothing of any is left in any service, and their memory, threads
and descriptors have not grown.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from pathlib import Path

import psutil
import pytest
from manylora.client import Client, Finished, RequestFailed, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 64
TENANTS = ("ash", "birch", "cedar")
SKILLS = ("json", "reverse", "upper", "words")
NAMES = ("one", "two", "three", "four")
EXPECTED_CODES = ("NOT_FOUND", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION")
"""An adapter that is not (any more) there, a deadline too short, an adapter that went between admission and load."""
GROWTH_BYTES = 48 << 20
"""How much a process may hold more at the end than after the first quarter: allocator noise, not a leak per request."""
GROWTH_DESCRIPTORS = 16


class Load:
    """The callers, and what became of each of their requests."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._rng = rng
        self._addresses = cluster.router_addresses

    async def caller(self, until: float) -> None:
        """One stream after the other, on a connection that is dropped now and then."""
        while time.monotonic() < until:
            async with Client(self._rng.choice(self._addresses), retry=None) as client:
                for _ in range(self._rng.randint(1, 12)):
                    if time.monotonic() >= until or not await self._request(client):
                        break

    async def _request(self, client: Client) -> bool:
        """One request. False where the caller drops its connection in mid-stream."""
        rng = self._rng
        behaviour = rng.choices(("read", "cancel", "disconnect", "slow", "deadline"), (60, 15, 8, 7, 10))[0]
        stream = client.generate(
            [rng.randrange(0, 256) for _ in range(rng.choice((2, 9, 40, 150)))],
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
                    self.outcomes["cancelled by the caller"] += 1
                    return True
                elif behaviour == "disconnect" and rng.random() < 0.3:
                    self.outcomes["disconnected by the caller"] += 1
                    return False
        except RequestFailed as failure:
            # They ask for more than two workers do in time, so overload control may refuse them. Nothing else may
            # be exhausted: no quota is set, and no reader is slow enough to be cut off.
            is_overload = failure.reason == "OVERLOADED"
            if len(finished) > 1 or (failure.code not in EXPECTED_CODES and not is_overload):
                raise
            self.outcomes[failure.code] += 1
        else:
            assert [f.outcome for f in finished] == ["completed"]
            self.outcomes["completed"] += 1
        return True

    async def churn(self, client: Client, until: float) -> None:
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
    rng = random.Random(1)
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path,
        workers=2,
        routers=2,
        worker_flags=("--num-blocks=160", "--sequence-slots=24", "--device-adapter-mb=1", "--host-adapter-mb=1.4"),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as client:
        for tenant in TENANTS:
            await client.tenants.apply(f"tenant_id: {tenant}")
        load = Load(cluster, rng)
        until = time.monotonic() + seconds
        callers = asyncio.gather(*(load.caller(until) for _ in range(STREAMS)), load.churn(client, until))
        await asyncio.sleep(seconds / 4)
        early = _footprints(cluster)
        await callers
        await _wait_until_empty(client)
        late = _footprints(cluster)
        starts = {name: child.starts for name, child in cluster.children.items()}
    print(dict(load.outcomes), early, late)
    assert load.outcomes["completed"] > seconds
    assert set(starts.values()) == {1}, f"a process died: {starts}"
    for name, (memory_bytes, descriptors) in late.items():
        assert memory_bytes <= early[name][0] + GROWTH_BYTES, f"{name} grew: {early[name]} -> {late[name]}"
        assert descriptors <= early[name][1] + GROWTH_DESCRIPTORS, f"{name} grew: {early[name]} -> {late[name]}"


def _footprints(cluster: LocalCluster) -> dict[str, tuple[int, int]]:
    """By process: (resident bytes, open descriptors)."""
    found = {}
    for name, pid in cluster.pids.items():
        process = psutil.Process(pid)
        found[name] = (process.memory_info().rss, process.num_fds())
    return found


async def _wait_until_empty(client: Client) -> None:
    """Until no service holds anything of any request."""
    async with asyncio.timeout(15):
        while True:
            status = await client.status()
            busy = [f for f in status.scheduler.flows if f.queued or f.running]
            busy += [w for w in status.workers if w.running or w.kv_blocks_free != w.kv_blocks_total]
            if not busy:
                return
            await asyncio.sleep(0.1)
