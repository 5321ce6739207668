"""A cluster with TLS on every port: what crosses the wire, who is let in, and certificates exchanged under load."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from manylora.client import Client, RequestFailed
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME
from manylora.local import certs
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.coordination.peers import read_secret

SECRET = "a prompt that nobody else may read"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    data = tmp_path_factory.mktemp("tls")
    options = ClusterOptions(model=BASE_FOLDER, model_name=BASE_NAME, data=data, http_port=0, tls=True)
    async with LocalCluster(options) as running:
        async with client_of(running) as client:
            await client.tenants.apply("tenant_id: acme\n")
        yield running


def client_of(cluster: LocalCluster, **given: Any) -> Client:
    return Client(cluster.router, **{"key": read_key(cluster.key_file), "tls_ca": cluster.tls_ca, **given})


async def ask(client: Client) -> str:
    answer = await client.complete(SECRET, tenant="acme", max_tokens=4)
    return answer.text


class Capture:
    """Whatever crosses the loopback device."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self.seen = bytearray()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_over.is_set():
            try:
                self.seen += self._socket.recv(1 << 16)
            except TimeoutError:
                continue

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()


@contextmanager
def captured() -> Any:
    try:
        capture = Capture()
    except PermissionError:
        pytest.skip("capturing packets needs root")
    try:
        yield capture
    finally:
        capture.close()


async def test_neither_prompt_nor_key_can_be_read_on_the_wire(cluster: LocalCluster) -> None:
    key = read_key(cluster.key_file)
    peer_secret = read_secret(cluster.peer_secret_file)
    with captured() as capture:
        plain = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*plain.sockets[0].getsockname())
        writer.write(b"what is sent in clear is seen")
        await writer.drain()
        async with client_of(cluster) as client:
            await ask(client)
            made, _ = await client.keys.create(["generate"], tenant="acme", name=SECRET)  # its record goes to etcd
        await asyncio.to_thread(over_http, cluster)
        await asyncio.sleep(0.5)
        writer.close()
        plain.close()
    assert b"what is sent in clear is seen" in capture.seen
    for secret in (SECRET, key, key.rpartition("-")[2], made, made.split("-")[1], peer_secret):
        assert secret.encode() not in capture.seen


def over_http(cluster: LocalCluster) -> int:
    request = urllib.request.Request(
        f"https://{cluster.http_addresses[0]}/v1/completions",
        data=f'{{"model": "{BASE_NAME}", "prompt": "{SECRET}", "max_tokens": 2}}'.encode(),
        headers={"authorization": f"Bearer {read_key(cluster.key_file)}", "x-tenant-id": "acme"},
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=cluster.tls_ca)) as answer:
        return int(answer.status)


async def test_who_trusts_nobody_or_somebody_else_gets_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    certs.make(tmp_path, [], datetime.datetime.now(datetime.UTC))
    for tls_ca in ("", str(tmp_path / certs.CA)):
        async with client_of(cluster, tls_ca=tls_ca, retry=None) as client:
            with pytest.raises(RequestFailed) as error:
                await client.status(timeout_s=5)
            assert error.value.code == "UNAVAILABLE"
    with pytest.raises(OSError, match=r"certificate|alert|closed|reset"):
        etcds_version(cluster)
    with pytest.raises(ssl.SSLError):
        ssl.get_server_certificate(address_of(cluster.http_addresses[0]), ca_certs=str(tmp_path / certs.CA))


def etcds_version(cluster: LocalCluster) -> bytes:
    """As one asks who has no certificate."""
    context = ssl.create_default_context(cafile=cluster.tls_ca)
    with (
        socket.create_connection(address_of(cluster.etcd_address)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        encrypted.send(b"GET /version HTTP/1.1\r\n\r\n")
        return encrypted.recv(100)


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def test_certificates_are_exchanged_under_load(cluster: LocalCluster) -> None:
    before = shown(cluster)
    over = asyncio.Event()
    answers: list[str] = []

    async def load() -> None:
        while not over.is_set():
            async with client_of(cluster, retry=None) as client:  # a handshake each
                answers.append(await ask(client))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(load())
        for _ in range(3):
            certs.make(cluster.tls_folder, [], datetime.datetime.now(datetime.UTC))
            await asyncio.sleep(2.5)
        over.set()
    assert set(shown(cluster)).isdisjoint(before)
    assert len(answers) > 4


def shown(cluster: LocalCluster) -> list[str]:
    return [ssl.get_server_certificate(address_of(each)) for each in (cluster.router, cluster.http_addresses[0])]
