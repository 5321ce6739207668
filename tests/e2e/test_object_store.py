"""A cluster whose adapter store is a bucket of a real S3 server: routers and workers share no folder."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from manylora.client import Client, RequestFailed
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.stores.adapter_files import FILE_NAMES, WEIGHTS_NAME

from tests.s3_server import KEY_ID, SECRET, S3Server, running

PROMPTS = {"upper": "do:ab3=", "words": "do:ab3=", "reverse": "do:ab3="}


@dataclass(frozen=True)
class Hosted:
    server: S3Server
    cluster: LocalCluster
    folder: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("store")
        started.make_bucket("team")
        yield started


@pytest.fixture
async def hosted(server: S3Server, tmp_path: Path) -> AsyncIterator[Hosted]:
    access = {
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": f"file:{server.folder / 'id'}",
        "secret_access_key": f"file:{server.folder / 'secret'}",
    }
    rules = [{"prefix": "s3://team/acme", "tenants": ["acme"], "access": access}]
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump(rules))
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path / "data",
        workers=2,
        kv_cache_mb=64,
        adapter_store="s3://store/cluster",
        adapter_store_access=str(server.access_file()),
        adapter_sources=str(tmp_path / "sources.yaml"),
        start_timeout_s=120.0,
    )
    cluster = LocalCluster(options)
    async with cluster:
        await cluster.wait_connected()
        yield Hosted(server, cluster, tmp_path)
    said = "".join(log.read_text() for log in (tmp_path / "data" / "logs").glob("*.log"))
    assert SECRET not in said
    assert KEY_ID not in said


@pytest.mark.e2e
@pytest.mark.slow
async def test_add_serve_lose_the_bucket_and_come_back(hosted: Hosted) -> None:
    server, bucket = hosted.server, hosted.server.bucket("s3://store/cluster")
    team = server.bucket("s3://team/acme/upper")
    for name in FILE_NAMES:
        team.put(name, adapter_folder("upper") / name)
    async with Client(hosted.cluster.router, key=hosted.cluster.key_file.read_text().strip(), tenant="acme") as client:
        await client.tenants.apply("tenant_id: acme\n")
        await client.adapters.add_from_source("acme", "upper", "s3://team/acme/upper")
        added = await client.adapters.add("acme", "words", adapter_folder("words"))
        reverse = await client.adapters.add("acme", "reverse", adapter_folder("reverse"))
        before = {
            name: (await client.complete(prompt, adapter=name, max_tokens=8)).text for name, prompt in PROMPTS.items()
        }
        assert before["upper"].startswith("AB3")
        with pytest.raises(RequestFailed, match="is missing"):
            await client.adapters.add_from_source("acme", "none", "s3://team/acme/none")

        # what no worker's disk has, and the bucket gives changed
        for worker in range(2):
            hosted.cluster.children[f"worker-{worker}"].kill()
        shutil.rmtree(hosted.folder / "data" / "adapter-cache" / "objects" / f"{reverse.version}@acme")
        bad = hosted.folder / "bad"
        bad.write_bytes((adapter_folder("reverse") / WEIGHTS_NAME).read_bytes()[:-64])
        bucket.put(f"objects/{reverse.version}/{WEIGHTS_NAME}", bad)
        await hosted.cluster.wait_connected()
        with pytest.raises(RequestFailed, match="not what was registered") as failed:
            await client.complete(PROMPTS["reverse"], adapter="reverse", max_tokens=8)
        assert failed.value.code == "FAILED_PRECONDITION"
        for name in ("upper", "words"):
            assert (await client.complete(PROMPTS[name], adapter=name, max_tokens=8)).text == before[name]

        # the bucket is gone: what is on a disk is served
        shutil.rmtree(hosted.folder / "data" / "adapter-cache" / "objects" / f"{added.version}@acme")
        server.stop()
        assert (await client.complete(PROMPTS["upper"], adapter="upper", max_tokens=8)).text == before["upper"]
        server.start()
