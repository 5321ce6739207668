"""One real etcd for the tests of this folder that do not harm it. Those that do start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from manylora_shared.coordination.binary import EtcdProcess, start_etcd


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdProcess]:
    process = await start_etcd(tmp_path_factory.mktemp("etcd"), sync_to_disk=False)
    yield process
    await process.stop()
