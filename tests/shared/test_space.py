"""A store that fills up is said to, before it takes no more; who leads then leads on."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from manylora_shared.coordination import space as module
from manylora_shared.coordination.base import Space, StoreUnavailable
from manylora_shared.coordination.binary import start_etcd
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.session import Election
from manylora_shared.coordination.space import SpaceWatch
from manylora_shared.telemetry import Telemetry
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer

QUOTA_BYTES = 256 << 10


def test_what_is_said_of_a_store_that_fills_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = MemoryStoreServer()
        watch = SpaceWatch(server.client(), Telemetry.disabled(), quota_bytes=1000)
        task = asyncio.create_task(watch.run())
        server.set_up(False)
        await asyncio.sleep(module.LOOK_S + 1)
        assert watch.last is None
        server.set_up(True)
        for space, expected in (
            (Space(790, 0, False), None),
            (Space(800, 0, False), (logging.WARNING, "nearly full")),
            (Space(800, 2000, False), None),
            (Space(990, 0, True), (logging.ERROR, "takes no changes")),
        ):
            server.space = space
            caplog.clear()
            await asyncio.sleep(module.LOOK_S)
            assert watch.last == Space(space.used_bytes, space.quota_bytes or 1000, space.is_full)
            said = [(record.levelno, record.getMessage()) for record in caplog.records]
            if expected is None:
                assert not said
            else:
                ((level, message),) = said
                assert level == expected[0]
                assert expected[1] in message
        task.cancel()

    run(main(), seed=1)


async def fill(store: EtcdStore) -> None:
    for _ in range(200):
        await store.put("/filler", bytes(16 << 10))


async def test_a_full_etcd_says_so_and_keeps_its_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    etcd = await start_etcd(tmp_path, sync_to_disk=False, extra_arguments=[f"--quota-backend-bytes={QUOTA_BYTES}"])
    store = EtcdStore([etcd.endpoint])
    try:
        watch = SpaceWatch(store, Telemetry.disabled(), quota_bytes=QUOTA_BYTES)
        looking = asyncio.create_task(watch.run())
        election = Election(store, key="/leader", value=b"me", ttl_s=2)
        election.start()
        epoch = await election.elected()
        with pytest.raises(StoreUnavailable, match="space"):
            await fill(store)
        await asyncio.sleep(0.5)
        assert watch.last is not None
        assert watch.last.is_full
        assert watch.last.used_bytes > 0.8 * QUOTA_BYTES
        await asyncio.sleep(3)
        assert election.is_leader(asyncio.get_running_loop().time())
        assert election.epoch == epoch
        looking.cancel()
        await election.resign()
    finally:
        await store.close()
        await etcd.stop()
