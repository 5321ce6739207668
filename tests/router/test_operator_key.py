"""The operator's key file: who may read it, and what becomes of it where the store knows another."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from manylora_router.admin.access import operator_key
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import KeyRecord
from manylora_shared.tenancy.identity import authenticate, split_key
from router_fakes import (
    RouterCluster,
)


async def will(what: str, target: str, after: bytes) -> None:
    assert (what, KeyRecord.from_json(after).key) == ("operator key file", keys.api_key(target.removeprefix("key ")))


def test_the_operators_key_file(tmp_path: Any) -> None:
    path = tmp_path / "deep" / "operator.key"

    async def ensure(cluster: RouterCluster) -> str:
        await operator_key.ensure(
            cluster.store, path, getrandbits=cluster.key_rng.getrandbits, now_unix_s=1.0, will=will
        )
        assert path.stat().st_mode & 0o777 == 0o600
        return str(path.read_text().strip())

    async def stored(cluster: RouterCluster) -> dict[str, KeyRecord]:
        listing = await cluster.store.list(keys.API_KEYS)
        records = [KeyRecord.from_json(kv.value) for kv in listing.kvs]
        return {record.key_id: record for record in records}

    async def test(cluster: RouterCluster) -> None:
        key = await ensure(cluster)
        assert authenticate(key, (await stored(cluster)).get, now_unix_s=0.0).tenant_id is None
        assert await ensure(cluster) == key
        key_id, _ = split_key(key) or ("", "")
        # A store that has lost it gets it back; one that has revoked it gets another.
        await cluster.store.delete(keys.api_key(key_id))
        assert await ensure(cluster) == key
        record = (await stored(cluster))[key_id]
        await cluster.put_key_record(dataclasses.replace(record, revoked_unix_s=3.0))
        other = await ensure(cluster)
        assert other != key
        assert (await stored(cluster))[key_id].revoked_unix_s == 3.0
        authenticate(other, (await stored(cluster)).get, now_unix_s=0.0)
        other_id, _ = split_key(other) or ("", "")
        await cluster.store.put(keys.api_key(other_id), b'{"key_id": [7]}')
        assert await ensure(cluster) not in (key, other)
        await cluster.store.delete(keys.api_key(other_id))
        path.write_text("nonsense")
        assert await ensure(cluster) not in (key, other, "nonsense")
        path.chmod(0o640)  # as a Secret of Kubernetes is mounted
        await operator_key.ensure(cluster.store, path, getrandbits=lambda bits: 0, now_unix_s=1.0, will=will)
        path.chmod(0o644)
        with pytest.raises(PermissionError, match="0600"):
            await ensure(cluster)

    async def main() -> None:
        cluster = RouterCluster()
        await test(cluster)

    asyncio.run(main())
