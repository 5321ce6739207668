"""Secrets and tenants' texts are planted wherever they can go in, and looked for wherever services write."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora.client import Client, RequestFailed, Sampling
from manylora.v1 import admin_pb2, inference_pb2, worker_pb2
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.peers import read_secret
from manylora_shared.errors import RpcError
from manylora_shared.metadata import PEER_KEY
from manylora_shared.transport.base import methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
CREATE_KEY = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])["CreateKey"]
HEADERS = ("cookie", "last-event-id", "x-amz-security-token", "x-goog-api-key", "x-vault-token")
EXECUTE = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["Execute"]


class Planted:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def __call__(self, where: str) -> str:
        return self.values.setdefault(where, secrets.token_hex(16))

    def key(self, where: str) -> str:
        return f"mlk-{secrets.token_hex(8)}-{self(where)}"

    def found(self, files: Iterator[Path]) -> list[str]:
        texts = {path: path.read_bytes() for path in files}
        return [
            f"{where} in {path}"
            for where, value in self.values.items()
            for path, text in texts.items()
            if value.encode() in text
        ]


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with contextlib.suppress(RpcError, RequestFailed, http.client.HTTPException, ConnectionError):
        yield


async def by_grpc(cluster: UpCluster, planted: Planted) -> None:
    channel = GrpcTransport().connect(cluster.router)
    for where, metadata in {
        "a wrong key": {"authorization": f"Bearer {planted.key('a wrong key')}"},
        "basic": {"authorization": f"Basic {planted('basic')}"},
        "bare": {"authorization": planted("bare")},
        "a wrong token": {"authorization": f"Bearer eyJhbGciOiJFUzI1NiJ9.{planted('claims')}.{planted('signature')}"},
        "api key": {"x-api-key": planted("api key")},
        "two": {"authorization": f"Bearer x, Bearer {planted.key('two')}"},
        **{name: {name: planted(name)} for name in HEADERS},
        "a name": {"x-adapter-id": f"https://host/?token={planted('a query')}&X-Amz-Signature={planted('signed')}"},
    }.items():
        with refused():
            request = inference_pb2.GenerateRequest(text=planted(f"text with {where}"))
            await channel.stream(GENERATE, request, metadata=metadata).read()
        with refused():
            await channel.call(CREATE_KEY, admin_pb2.CreateKeyRequest(), metadata=metadata)
    await channel.close()
    async with Client(cluster.router) as client:
        worker = (await client.status()).workers[0]
    peer = GrpcTransport().connect(worker.address)
    with refused():
        await peer.stream(EXECUTE, worker_pb2.ExecuteRequest(), metadata={PEER_KEY: planted("a wrong peer")}).read()
    await peer.close()


async def by_client(cluster: UpCluster, planted: Planted, folder: Path) -> None:
    async with Client(cluster.router) as operator:
        made, _ = await operator.keys.create(["generate"], tenant="acme", name="planted")
        planted.values["a tenant's key"] = made.rpartition("-")[2]
        gone, _ = await operator.keys.create(["generate"], tenant="acme")
        planted.values["a revoked key"] = gone.rpartition("-")[2]
        await operator.keys.revoke(gone.split("-")[1])
        with refused():
            await operator.tenants.apply(f"tenant_id: acme\nkey: {planted.key('a policy')}\n")
        for line in (f"password: {planted('an unquoted value')}", f"api_key: 'hf_{planted('a hub')}'"):
            with refused():
                await operator.tenants.apply(f"tenant_id: acme\nquotas:\n  {line}\n")
        for source in (f"https://u:{planted('a user')}@host/x", f"https://host/x?token={planted('a source')}"):
            with refused():
                await operator.adapters.add_from_source("acme", "planted", source)
        config = {"peft_type": "LORA", "base_model_name_or_path": f"https://u:{planted('a file')}@host/m", "r": 8}
        (folder / "adapter_config.json").write_text(json.dumps(config | {planted("a field"): planted("a value")}))
        (folder / "adapter_model.safetensors").write_bytes(planted("weights").encode())
        with refused():
            await operator.adapters.add("acme", "planted", folder)
    for key in (made, gone):
        async with Client(cluster.router, key=key, retry=None) as client:
            for stop in ("", planted("stop")):
                with refused():
                    await client.complete(planted("prompt"), stop=[stop] if stop else [], max_tokens=4)
                with refused():
                    await client.complete([{"role": "user", "content": planted("chat")}], max_tokens=4)
            with refused():
                await client.complete(planted("too long") * 9000, max_tokens=4)
            with refused():
                await client.complete(planted("wrong"), sampling=Sampling(temperature=-1.0))
            with refused():
                await client.complete(planted("late") * 50, max_tokens=2000, timeout_s=0.05)
            with refused():
                await client.complete(planted("unknown"), adapter="none", idempotency_key=planted("idempotency"))


def by_http(cluster: UpCluster, planted: Planted) -> None:
    body = {"prompt": planted("http prompt"), "max_tokens": 2, planted("http field"): planted("http value")}
    for headers in (
        {"Authorization": f"Bearer {planted.key('http key')}"},
        {"Authorization": f"Basic {planted('http basic')}", "X-Api-Key": planted("http x-api-key")},
        {"Authorization": f"Bearer eyJhbGciOiJSUzI1NiJ9.{planted('http claims')}.{planted('http signature')}"},
        {name: planted(f"http {name}") for name in HEADERS},
    ):
        for path in ("/v1/completions", f"/v1/{planted('path')}?key={planted('query')}", "/v1/load_lora_adapter"):
            for sent in (json.dumps(body), f'{{"prompt": "{planted("no JSON")}'):
                with refused():
                    connection = http.client.HTTPConnection(str(cluster.ready["http"]), timeout=10)
                    connection.request("POST", path, sent, {**headers, "Content-Type": "application/json"})
                    connection.getresponse().read()
                    connection.close()


async def garbage(cluster: UpCluster, planted: Planted) -> None:
    """What is no request, with keys in it, to every port."""
    async with Client(cluster.router) as client:
        status = await client.status()
    addresses = [cluster.router, cluster.ready["http"], status.scheduler.address, *(w.address for w in status.workers)]
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        for sent in (
            f"GET / HTTP/1.1\r\nAuthorization: Bearer {planted.key('raw')}\r\n\xff\r\n\r\n".encode("latin-1"),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + planted("frames").encode() * 10,
        ):
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                await asyncio.wait_for(reader.read(), 1)
                writer.close()


def written(cluster: UpCluster) -> Iterator[Path]:
    data = Path(cluster.ready["data"])
    yield from (data / "logs").iterdir()
    yield from (cluster.stderr_path, cluster.trace_file)
    for name in cluster.ready["pids"]:
        yield Path(f"/proc/{cluster.pid(name)}/cmdline")


async def test_what_is_planted_is_written_nowhere(whole: UpCluster, tmp_path: Path) -> None:
    planted = Planted()
    planted.values["the peer secret"] = read_secret(Path(whole.ready["data"]) / "peer.secret")
    store = EtcdStore([str(whole.ready["etcd"])])
    kept = await store.list("/")
    await store.close()
    assert not [kv.key for kv in kept.kvs if planted.values["the peer secret"].encode() in kv.value]
    await by_grpc(whole, planted)
    await by_client(whole, planted, tmp_path)
    await asyncio.to_thread(by_http, whole, planted)
    await garbage(whole, planted)
    whole.kill("worker-1")
    whole.kill("scheduler")
    await asyncio.sleep(2)  # traces are written in batches
    await whole.wait_complete()
    assert len(planted.values) > 30
    assert planted.found(written(whole)) == []
