"""A cluster that seals what it stores: what tenants brought is in no file, and is gone with its tenant."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from manylora.client import Client, RequestFailed
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.coordination import keys
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.records import DataKeyRecord
from manylora_shared.encryption.key_service import LocalKeys
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.encryption.sealing import MAGIC, Sealed, SealedFile
from manylora_shared.stores.adapter_files import FILE_NAMES, WEIGHTS_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

SECURITY = "security: {data_retention_days: 7, "
GATE = "adapters: {gate: {samples: golden, judge: contains, min_score: 0}}\n"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path / "data",
        workers=2,
        kv_cache_mb=64,
        encryption="local",
        http_port=0,
        start_timeout_s=120.0,
    )
    async with LocalCluster(options) as running:
        await running.wait_connected()
        yield running


def key_of(cluster: LocalCluster) -> str:
    return cluster.key_file.read_text().strip()


async def keyring_of(cluster: LocalCluster, data: Path) -> tuple[Keyring, EtcdStore]:
    """What somebody has who holds all keys that there are now."""
    store = EtcdStore([cluster.etcd_address])
    keyring = Keyring(LocalKeys(data / "encryption.keys"))
    await keyring.start(store)
    return keyring, store


def found_in(data: Path, planted: dict[str, bytes]) -> list[str]:
    texts = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert any("etcd" in path.parts for path in texts)
    return [f"{what} in {path}" for what, value in planted.items() for path, text in texts.items() if value in text]


async def test_nothing_of_a_tenant_is_in_any_file_and_nothing_opens_after_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    weights = (adapter_folder("upper") / WEIGHTS_NAME).read_bytes()
    planted = {f"the weights at {at}": weights[at : at + 48] for at in (64, len(weights) // 2, len(weights) - 48)}
    prompt, sample, mail = secrets.token_hex(12), secrets.token_hex(12), f"{secrets.token_hex(6)}@example.com"
    planted |= {"a prompt": prompt.encode(), "a sample": sample.encode(), "an address": mail.encode()}
    async with Client(cluster.router, key=key_of(cluster)) as operator:
        for tenant in ("acme", "birch"):
            await operator.tenants.apply(f"tenant_id: {tenant}\n")
        line = json.dumps({"prompt": f"do:{sample}=", "expected": sample.upper()})
        await operator.adapters.put_samples("acme", "golden", line.encode())
        await operator.tenants.apply(f"tenant_id: acme\n{GATE}{SECURITY}scrub_names: [Ann Bell]}}\n")
        for tenant in ("acme", "birch"):
            await operator.adapters.add(tenant, "upper", adapter_folder("upper"))
        key, _ = await operator.keys.create(["generate"], tenant="acme")
        planted["the tenant's key"] = key.rpartition("-")[2].encode()
    async with Client(cluster.router, key=key) as acme:
        assert (await acme.complete("do:ab3=", adapter="upper", max_tokens=8)).text.startswith("AB3")
        await acme.complete(f"do:{prompt}=", adapter="upper", max_tokens=8)
    await asyncio.to_thread(ask_as, cluster, key, "ann", f"do:ab3= (Ann Bell, {mail})")
    async with Client(cluster.router, key=key_of(cluster), tenant="acme") as operator:
        kept = [text async for text in operator.texts.export("acme", user="ann")]
        assert [text.prompt for text in kept] == ["do:ab3= ([name], [email])"]
        assert len([text async for text in operator.texts.export("acme")]) == 3
        assert list((data / "adapters" / "documents" / "acme" / "texts").iterdir())
    keyring, store = await keyring_of(cluster, data)
    theirs = await asyncio.to_thread(keyring.sealing, "acme")
    planted["the tenant's data key"] = theirs.secret
    planted["the same in hex"] = theirs.secret.hex().encode()
    assert found_in(data, planted) == []
    named = {"an adapter's name": b"upper", "a key's id": key.split("-")[1].encode()}
    await in_no_book(cluster, data, named)
    stored = [path for path in (data / "adapters").rglob("*") if path.is_file()]
    assert len(stored) >= 6  # two adapters' files, samples, reports
    assert all(path.read_bytes().startswith(MAGIC) for path in stored)

    copy = tmp_path / "copy"
    shutil.copytree(data / "adapters", copy)
    before = await store.get(keys.data_key("acme"))
    assert before is not None
    with (copy / sealed_weights(copy, "acme")).open("rb") as file:
        assert SealedFile(file, WEIGHTS_NAME, _Fetched(keyring)).read(64) is not None
    async with Client(cluster.router, key=key_of(cluster)) as operator:
        assert await operator.texts.erase("ann", "acme") == 1
        assert [text async for text in operator.texts.export("acme", user="ann")] == []
        used = await spent(operator)
        await operator.tenants.delete("acme")
        async with asyncio.timeout(30):
            while "acme" in keyring.owners:  # noqa: ASYNC110 - it hears of it a moment later, and tells nobody
                await asyncio.sleep(0.01)
        assert await spent(operator) == {"": used[""], "(unreadable)": used["upper"]}, "amounts stay, names go"
        await asyncio.to_thread(expect_sealed, keyring, copy)
        rotated = await operator.encryption.rotate()
        assert (rotated.rewrapped, rotated.forgotten) == (2, True)  # birch, and the cluster
        assert dict((await operator.encryption.get()).data_keys) == {rotated.wrapped_by: 2}
    # Somebody kept a copy of etcd from before, and has all keys that are left.
    record = DataKeyRecord.stored(before)
    await store.put(before.key, record.to_json())
    later, again = await keyring_of(cluster, data)
    await asyncio.to_thread(expect_sealed, later, copy)
    await store.delete(before.key)
    async with Client(cluster.router, key=key_of(cluster), tenant="birch") as birch:  # has the same adapter
        assert (await birch.complete("do:ab3=", adapter="upper", max_tokens=8)).text.startswith("AB3")
        with pytest.raises(RequestFailed):
            await birch.complete("do:ab3=", tenant="acme", adapter="upper", max_tokens=8)
    for each, its in ((keyring, store), (later, again)):
        await each.close()
        await its.close()


async def in_no_book(cluster: LocalCluster, data: Path, named: dict[str, bytes]) -> None:
    """Of ledger and audit log, which an operator reads."""
    async with Client(cluster.router, key=key_of(cluster)) as operator:
        assert "upper" in await spent(operator)
        entries = (await operator.audit.read(last=1000)).segments
        assert any(b"upper" in segment.data for segment in entries)
        assert not any(b"upper" in segment.data for segment in (await operator.audit.read()).segments)
    assert await asyncio.to_thread(found_in_books, data, named) == []


def found_in_books(data: Path, named: dict[str, bytes]) -> list[str]:
    """The audit log tells who acted by the key's id."""
    books = [path for name in ("usage.sqlite*", "ledger-log/*/*", "audit/*") for path in data.glob(name)]
    assert {path.suffix for path in books} >= {".sqlite", ".wal", ".sealed", ".jsonl"}
    found = [(what, path) for what, text in named.items() for path in books if text in path.read_bytes()]
    return [f"{what} in {path}" for what, path in found if what != "a key's id" or path.parent.name != "audit"]


async def spent(operator: Client) -> dict[str, int]:
    """Of acme, by adapter: completion tokens."""
    sums, _ = await operator.usage.sums(["adapter"], tenant="acme")
    return {each["adapter"]: each["completion_tokens"] for each in sums}


def ask_as(cluster: LocalCluster, key: str, user: str, prompt: str) -> None:
    body = {"model": "upper", "prompt": prompt, "max_tokens": 4, "user": user}
    request = Request(f"http://{cluster.http_addresses[0]}/v1/completions", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {key}")
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["choices"]


class _Fetched:
    """Keys of a keyring, as they were before."""

    def __init__(self, keyring: Keyring) -> None:
        self.opening = keyring.opening


def sealed_weights(root: Path, tenant: str) -> Path:
    return next(root.glob(f"sealed/*/{tenant}/{WEIGHTS_NAME}"))


def expect_sealed(keyring: Keyring, copy: Path) -> None:
    for name in FILE_NAMES:
        with sealed_weights(copy, "acme").with_name(name).open("rb") as file, pytest.raises(Sealed):
            SealedFile(file, name, keyring)
