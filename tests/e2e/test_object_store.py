"""A cluster whose adapter store is a bucket of a real S3 server: router and worker share no folder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from manylora.client import Client, RequestFailed, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.stores.adapter_files import FILE_NAMES, WEIGHTS_NAME

from tests.s3_server import KEY_ID, SECRET, Gate, S3Server, running

PROMPT = "do:ab3="
NAMES = ("upper", "words", "reverse")
FAULTS = ("lost", "dead", "keys", "changed", "cut", "missing")  # a tenant each, which has a copy of its own


@dataclass(frozen=True)
class Hosted:
    server: S3Server
    gate: Gate  # between the cluster and its bucket
    cluster: LocalCluster
    folder: Path

    def client(self, tenant: str) -> Client:
        return Client(self.cluster.router, key=self.cluster.key_file.read_text().strip(), tenant=tenant)

    @property
    def on_disk(self) -> dict[str, Path]:
        return {each.name: each for each in (self.folder / "data" / "adapter-cache" / "objects").iterdir()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("store")
        started.make_bucket("team")
        yield started


@pytest.fixture
async def hosted(server: S3Server, tmp_path: Path) -> AsyncIterator[Hosted]:
    gate = Gate(server.port)
    access = yaml.safe_load(server.access_file().read_text())
    rules = [{"prefix": "s3://team/acme", "tenants": ["acme"], "access": access}]
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump(rules))
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path / "data",
        workers=1,
        kv_cache_mb=64,
        adapter_store="s3://store/cluster",
        adapter_store_access=str(server.access_file(gate.endpoint)),
        adapter_sources=str(tmp_path / "sources.yaml"),
        start_timeout_s=120.0,
    )
    cluster = LocalCluster(options)
    async with cluster:
        await cluster.wait_connected()
        yield Hosted(server, gate, cluster, tmp_path)
        gate.set("open")
    gate.close()
    said = "".join(log.read_text() for log in (tmp_path / "data" / "logs").glob("*.log"))
    assert SECRET not in said
    assert KEY_ID not in said


async def answer(hosted: Hosted, tenant: str, adapter: str) -> str:
    async with hosted.client(tenant) as client:
        return (await client.complete(PROMPT, adapter=adapter, max_tokens=8, sampling=Sampling(temperature=0))).text


async def refused(hosted: Hosted, tenant: str) -> tuple[str, str]:
    with pytest.raises(RequestFailed) as failed:
        await answer(hosted, tenant, "upper")
    return failed.value.code, str(failed.value)


async def prepared(hosted: Hosted) -> tuple[dict[str, str], str]:
    """acme's answers, and the digest of what every other tenant has. No worker has loaded anything since; acme's
    adapters are on the disk, the others' in the bucket alone."""
    team = hosted.server.bucket("s3://team/acme/upper")
    for name in FILE_NAMES:
        team.put(name, adapter_folder("upper") / name)
    digest = ""
    async with hosted.client("acme") as client:
        await client.tenants.apply("tenant_id: acme\n")
        await client.adapters.add_from_source("acme", "upper", "s3://team/acme/upper")
        for name in NAMES[1:]:
            await client.adapters.add("acme", name, adapter_folder(name))
        with pytest.raises(RequestFailed, match="is missing"):
            await client.adapters.add_from_source("acme", "none", "s3://team/acme/none")
        for tenant in FAULTS:
            await client.tenants.apply(f"tenant_id: {tenant}\n")
            digest = (await client.adapters.add(tenant, "upper", adapter_folder("upper"))).version
    before = {name: await answer(hosted, "acme", name) for name in NAMES}
    assert before["upper"].startswith("AB3")
    hosted.cluster.children["worker-0"].kill()
    for name, folder in hosted.on_disk.items():
        if not name.endswith("@acme"):
            shutil.rmtree(folder)
    await hosted.cluster.wait_connected()
    return before, digest


@pytest.mark.e2e
@pytest.mark.wide
async def test_each_fault_of_the_bucket_has_its_outcome_and_disturbs_nobody_else(hosted: Hosted) -> None:
    before, digest = await prepared(hosted)
    server, gate, bucket = hosted.server, hosted.gate, hosted.server.bucket("s3://store/cluster")

    gate.set("shut")
    code, message = await refused(hosted, "lost")
    assert (code, "the bucket cannot be used now" in message) == ("UNAVAILABLE", True)
    assert await answer(hosted, "acme", "words") == before["words"], "what is on a disk is served"
    gate.set("open")
    assert await answer(hosted, "lost", "upper") == before["upper"], "at the next try: nothing counts against it"

    gate.set("dead")
    waiting = [asyncio.create_task(answer(hosted, "dead", "upper")) for _ in range(12)]
    await asyncio.sleep(0)
    assert await answer(hosted, "acme", "reverse") == before["reverse"], "loads go on beside fetches that hang"
    gate.set("shut")
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {end.code for end in ends if isinstance(end, RequestFailed)} == {"UNAVAILABLE"}
    assert len(ends) == sum(isinstance(end, RequestFailed) for end in ends)
    gate.set("open")
    assert await answer(hosted, "dead", "upper") == before["upper"]

    server.forget_keys()
    code, message = await refused(hosted, "keys")
    assert (code, "refuses its credentials" in message) == ("UNAVAILABLE", True)
    server.forget_keys(after=1 << 30)
    assert await answer(hosted, "keys", "upper") == before["upper"]

    weights, stored = adapter_folder("upper") / WEIGHTS_NAME, f"objects/{digest}/{WEIGHTS_NAME}"
    data, bad = weights.read_bytes(), hosted.folder / "bad"
    for tenant, content in (("changed", data[:-1] + bytes([data[-1] ^ 1])), ("cut", data[:-64])):
        bad.write_bytes(content)
        bucket.put(stored, bad)
        code, message = await refused(hosted, tenant)
        assert (code, "not what was registered" in message) == ("FAILED_PRECONDITION", True)
        assert f"{digest}@{tenant}" not in hosted.on_disk
    bucket.delete([stored])
    code, message = await refused(hosted, "missing")
    assert (code, "is missing in the adapter store" in message) == ("FAILED_PRECONDITION", True)
    assert await answer(hosted, "acme", "upper") == before["upper"]
    bucket.put(stored, weights)
    for tenant in ("changed", "cut", "missing"):
        assert await answer(hosted, tenant, "upper") == before["upper"], "mended"
