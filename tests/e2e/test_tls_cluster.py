"""A cluster with TLS on every port: what crosses the wire, who is let in, and certificates exchanged under load."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from manylora.client import Client, Delta, RequestFailed
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME
from manylora.local import certs
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.coordination.peers import read_secret

SECRET = "a prompt that nobody else may read"
SIGNING = ec.generate_private_key(ec.SECP256R1())

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    data = tmp_path_factory.mktemp("tls")
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=data,
        http_port=0,
        tls=True,
        router_flags=(f"--token-issuers={issuers_in(data)}",),
    )
    async with LocalCluster(options) as running:
        async with client_of(running) as client:
            await client.tenants.apply("tenant_id: acme\n")
        yield running


def issuers_in(folder: Path) -> Path:
    key = jwt.get_algorithm_by_name("ES256").to_jwk(SIGNING.public_key(), as_dict=True)
    (folder / "jwks.json").write_text(json.dumps({"keys": [{**key, "kid": "one", "alg": "ES256"}]}))
    issuer = {"issuer": "https://idp", "audience": "manylora", "jwks": str(folder / "jwks.json")}
    (folder / "issuers.yaml").write_text(json.dumps({"issuers": [issuer]}))
    return folder / "issuers.yaml"


def token_of(tenant: str) -> str:
    """The signing party's, for the next minute."""
    claims = {"iss": "https://idp", "aud": "manylora", "exp": int(time.time()) + 60, "tenant": tenant}
    return jwt.encode({**claims, "scope": "generate"}, SIGNING, algorithm="ES256", headers={"kid": "one"})


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


async def test_neither_prompt_nor_key_nor_token_can_be_read_on_the_wire(cluster: LocalCluster) -> None:
    key, token = read_key(cluster.key_file), token_of("acme")
    peer_secret = read_secret(cluster.peer_secret_file)
    with captured() as capture:
        plain = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*plain.sockets[0].getsockname())
        writer.write(b"what is sent in clear is seen")
        await writer.drain()
        async with client_of(cluster) as client:
            await ask(client)
            made, _ = await client.keys.create(["generate"], tenant="acme", name=SECRET)  # its record goes to etcd
        async with client_of(cluster, key=token) as client:
            assert await client.complete(SECRET, max_tokens=2)
        await asyncio.to_thread(over_http, cluster, key)
        await asyncio.to_thread(over_http, cluster, token)
        await asyncio.sleep(0.5)
        writer.close()
        plain.close()
    assert b"what is sent in clear is seen" in capture.seen
    for secret in (SECRET, key, key.rpartition("-")[2], made, made.split("-")[1], peer_secret, *token.split(".")):
        assert secret.encode() not in capture.seen


def over_http(cluster: LocalCluster, key: str) -> int:
    request = urllib.request.Request(
        f"https://{cluster.http_addresses[0]}/v1/completions",
        data=f'{{"model": "{BASE_NAME}", "prompt": "{SECRET}", "max_tokens": 2}}'.encode(),
        headers={"authorization": f"Bearer {key}", "x-tenant-id": "acme"},
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
    for address in (cluster.http_addresses[0], *cluster.metrics_addresses.values()):
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            ssl.get_server_certificate(address_of(address), ca_certs=str(tmp_path / certs.CA))
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics", timeout=5)


async def test_services_take_no_other_than_services(cluster: LocalCluster, tmp_path: Path) -> None:
    """Who shows no certificate, a foreign one, or one that has expired."""
    own, foreign, old = cluster.tls_folder, tmp_path / "foreign", tmp_path / "old"
    certs.make(foreign, [], datetime.datetime.now(datetime.UTC))
    old.mkdir()
    for name in (certs.CA, certs.CA_KEY):
        (old / name).write_bytes((own / name).read_bytes())
    certs.make(old, [], datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=366))
    for name in ("scheduler", "worker-0"):
        address = str(cluster.children[name].ready["address"])
        assert code_of(address, own, own) == "UNIMPLEMENTED", "it is let in"
        for shows in (None, foreign, old):
            assert code_of(address, own, shows) == "UNAVAILABLE", (name, shows)


def code_of(address: str, trusts: Path, shows: Path | None) -> str:
    pair = [(shows / name).read_bytes() for name in (certs.KEY, certs.CERT)] if shows is not None else []
    credentials = grpc.ssl_channel_credentials((trusts / certs.CA).read_bytes(), *pair)
    with grpc.secure_channel(address, credentials) as channel:
        try:
            channel.unary_unary("/none/None")(b"", timeout=10)
        except grpc.RpcError as e:
            return str(e.code().name)
    return "OK"


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
    """Streams that run go on, new calls succeed, and soon every port shows another one."""
    over = asyncio.Event()
    answers: list[object] = []

    async def load() -> None:
        while not over.is_set():
            async with client_of(cluster, retry=None) as client:  # a handshake each
                answers.append(await ask(client))

    async def stay() -> None:
        async with client_of(cluster, retry=None) as client:
            while not over.is_set():
                answers.append(await ask(client))

    async def by_http() -> None:
        while not over.is_set():
            answers.append(await asyncio.to_thread(over_http, cluster, token_of("acme")))

    async with asyncio.TaskGroup() as tasks, client_of(cluster, retry=None) as client:
        for each in (load, load, stay, by_http):
            tasks.create_task(each())
        for _ in range(3):
            before = await asyncio.to_thread(shown, cluster)
            async with client.generate(SECRET, tenant="acme", max_tokens=200) as stream:
                events = aiter(stream)
                await anext(events)
                certs.make(cluster.tls_folder, [], datetime.datetime.now(datetime.UTC))
                await asyncio.to_thread(until_exchanged, cluster, before)
                answers += [event async for event in events if isinstance(event, Delta)]
        over.set()
    assert len(answers) > 10


def until_exchanged(cluster: LocalCluster, before: dict[str, str]) -> None:
    deadline = time.monotonic() + 30
    while not set(before.values()).isdisjoint(shown(cluster).values()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def shown(cluster: LocalCluster) -> dict[str, str]:
    return {address: ssl.get_server_certificate(address_of(address)) for address in ports(cluster)}


def ports(cluster: LocalCluster) -> Iterator[str]:
    """All of ours."""
    yield from (str(child.ready["address"]) for child in cluster.children.values() if "address" in child.ready)
    yield from cluster.http_addresses
    yield from cluster.metrics_addresses.values()
