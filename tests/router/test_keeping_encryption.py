"""DataService's encryption: what becomes of a store that lay in the clear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manylora.v1 import data_pb2
from manylora_router.keeping.encryption import EncryptionDesk
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.encryption import keyring as keyring_module
from manylora_shared.encryption.key_service import LocalKeys
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.encryption.sealing import MAGIC
from manylora_shared.errors import Unready
from manylora_shared.ids import AdapterDigest, TenantId
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, LocalAdapterFiles
from manylora_shared.stores.documents import SAMPLES, LocalDocuments, path_of
from manylora_sim.store import MemoryStore, MemoryStoreServer


async def will(target: str) -> None: ...


CALL: Any = SimpleNamespace(will=will)


class Bench:
    def __init__(self, root: Path, store: MemoryStore, keyring: Keyring) -> None:
        self.root = root
        self.store = store
        self.keyring = keyring

    def desk(self, *, is_on: bool = True) -> EncryptionDesk:
        entrance: Any = SimpleNamespace()  # who may is test_rules.py's
        keys = self.keyring if is_on else None
        files, documents = LocalAdapterFiles(self.root, keys=keys), LocalDocuments(self.root, keys=keys)
        return EncryptionDesk(entrance, self.store, keys, files, documents)

    async def sealed(self, tenant: str = "") -> list[tuple[str, str, str]]:
        request = data_pb2.SealStoresRequest(tenant_id=tenant)
        return [(each.tenant_id, each.what, each.problem) async for each in self.desk().seal(request, CALL)]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    server = MemoryStoreServer()
    store = server.client()
    keyring = Keyring(LocalKeys(tmp_path / "kek.json"))
    rotate = Keyring.rotate
    monkeypatch.setattr(keyring_module.Keyring, "rotate", lambda self: rotate(self, settle_s=0.0))
    await keyring.start(server.client())
    yield Bench(tmp_path / "store", store, keyring)
    await keyring.close()


async def plain_adapter(bench: Bench, tenant: str, name: str) -> AdapterDigest:
    files = LocalAdapterFiles(bench.root)
    incoming = await files.begin()
    await files.append(incoming, CONFIG_NAME, b'{"r": 8}')
    await files.append(incoming, WEIGHTS_NAME, b"weights of " + name.encode())
    digest = await files.finish(incoming)
    await files.commit(incoming, digest)
    await bench.store.put(keys.tenant(tenant), f"tenant_id: {tenant}\n".encode())
    record = AdapterRecord(tenant, name, digest, 8, 1000, ("q_proj",), 1.0)
    await bench.store.put(record.key, record.to_json())
    return digest


async def test_what_lies_in_the_clear_is_sealed_once(bench: Bench) -> None:
    digest = await plain_adapter(bench, "acme", "upper")
    assert await plain_adapter(bench, "birch", "upper") == digest
    await LocalDocuments(bench.root).put(path_of("acme", SAMPLES, "golden"), b"{}")
    assert await bench.sealed("birch") == [("birch", "adapter upper@1", "")]
    told = await bench.sealed()
    assert told == [("acme", "adapter upper@1", ""), ("acme", "samples/golden", "")]
    assert await bench.sealed() == []
    for tenant in (TenantId("acme"), TenantId("birch")):
        assert (bench.root / "sealed" / digest / tenant / WEIGHTS_NAME).read_bytes().startswith(MAGIC)
    assert list((bench.root / "incoming").iterdir()) == []


async def test_what_cannot_be_sealed_is_told(bench: Bench) -> None:
    digest = await plain_adapter(bench, "acme", "upper")
    path = bench.root / "objects" / digest / WEIGHTS_NAME
    path.chmod(0o644)
    path.write_bytes(b"other weights")
    assert await bench.sealed() == [("acme", "adapter upper@1", "its files are not what was registered")]
    path.unlink()
    assert "is missing" in (await bench.sealed())[0][2]


async def test_a_rotation_and_what_it_leaves(bench: Bench) -> None:
    await plain_adapter(bench, "acme", "upper")
    await bench.sealed()
    before = await bench.desk().get(data_pb2.GetEncryptionRequest(), CALL)
    told = await bench.desk().rotate(data_pb2.RotateEncryptionRequest(), CALL)
    after = await bench.desk().get(data_pb2.GetEncryptionRequest(), CALL)
    assert (before.on, dict(before.data_keys)) == (True, {before.wrapped_by: 1})
    assert (told.rewrapped, told.forgotten, dict(after.data_keys)) == (1, True, {told.wrapped_by: 1})
    assert before.wrapped_by != after.wrapped_by == told.wrapped_by


async def test_where_there_is_none(bench: Bench) -> None:
    off = bench.desk(is_on=False)
    assert not (await off.get(data_pb2.GetEncryptionRequest(), CALL)).on
    with pytest.raises(Unready, match="no --encryption"):
        await off.rotate(data_pb2.RotateEncryptionRequest(), CALL)
    with pytest.raises(Unready, match="no --encryption"):
        await anext(off.seal(data_pb2.SealStoresRequest(), CALL))
