"""TLS between a server and its clients: who is let in, and certificates that are exchanged while they are used."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
import threading
import time
from pathlib import Path

import pytest
from manylora.local import certs
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport import grpc_transport
from manylora_shared.transport.base import Channel
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.tls import Tls, TlsError, TlsFiles

from tests.shared.transport_echo import METHODS, echo_service, text

NOW = datetime.datetime.now(datetime.UTC)


def made(folder: Path, *hosts: str, now: datetime.datetime = NOW) -> TlsFiles:
    certs.make(folder, hosts, now)
    return TlsFiles(folder / certs.CERT, folder / certs.KEY, folder / certs.CA)


def trusting(files: TlsFiles) -> Tls:
    return Tls(TlsFiles(ca=files.ca))


async def answer(channel: Channel) -> str:
    try:
        return str((await channel.call(METHODS["Unary"], text("hi"), timeout=5)).text)
    finally:
        await channel.close()


async def asked(address: str, tls: Tls | None) -> Code:
    try:
        assert await answer(GrpcTransport(tls=tls).connect(address)) == "hi"
    except RpcError as e:
        return e.code
    return Code.OK


async def test_who_trusts_the_authority_is_served_and_nobody_else(tmp_path: Path) -> None:
    files, foreign = made(tmp_path / "own"), made(tmp_path / "foreign")
    server = await GrpcTransport(tls=Tls(files), acceptors=2).serve("127.0.0.1:0", [echo_service()])
    assert await asked(server.address, trusting(files)) is Code.OK
    assert await asked(server.address, trusting(foreign)) is Code.UNAVAILABLE
    assert await asked(server.address, None) is Code.UNAVAILABLE
    await server.stop(0)


async def test_a_handshake_that_does_not_go_on_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief = [(name, 300 if "handshake" in name else value) for name, value in grpc_transport._SERVER]
    assert dict(brief) != dict(grpc_transport._SERVER)
    monkeypatch.setattr(grpc_transport, "_SERVER", tuple(brief))
    files = made(tmp_path)
    server = await GrpcTransport(tls=Tls(files), acceptors=2).serve("127.0.0.1:0", [echo_service()])
    host, _, port = server.address.rpartition(":")
    for sent in (b"", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert await asked(server.address, trusting(files)) is Code.OK
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
    await server.stop(0)


async def test_a_server_that_asks_clients_serves_those_of_its_authority(tmp_path: Path) -> None:
    files, foreign = made(tmp_path / "own"), made(tmp_path / "foreign")
    server = await GrpcTransport(tls=Tls(files, asks_clients=True)).serve("127.0.0.1:0", [echo_service()])
    assert await asked(server.address, Tls(files)) is Code.OK
    assert await asked(server.address, trusting(files)) is Code.UNAVAILABLE, "it shows no certificate"
    stranger = Tls(TlsFiles(foreign.cert, foreign.key, files.ca))
    assert await asked(server.address, stranger) is Code.UNAVAILABLE
    await server.stop(0)


async def test_a_certificate_of_another_host_or_of_the_past_is_refused(tmp_path: Path) -> None:
    old = made(tmp_path / "old", now=NOW - datetime.timedelta(days=400))
    server = await GrpcTransport(tls=Tls(old)).serve("127.0.0.1:0", [echo_service()])
    assert await asked(server.address, trusting(old)) is Code.UNAVAILABLE
    await server.stop(0)


async def test_a_clients_certificate_of_the_past_is_refused(tmp_path: Path) -> None:
    old = made(tmp_path, now=NOW - datetime.timedelta(days=400))
    shows = Tls(old)
    server = await GrpcTransport(tls=Tls(made(tmp_path), asks_clients=True)).serve("127.0.0.1:0", [echo_service()])
    assert await asked(server.address, shows) is Code.UNAVAILABLE
    assert await asked(server.address, Tls(made(tmp_path))) is Code.OK
    await server.stop(0)


async def test_certificates_are_exchanged_while_they_are_used(tmp_path: Path) -> None:
    """A stream goes on, new calls have the new ones, at both ends; nothing fails."""
    files = made(tmp_path)
    serving, calling = Tls(files, asks_clients=True), Tls(files)
    server = await GrpcTransport(tls=serving).serve("127.0.0.1:0", [echo_service()])
    channel = GrpcTransport(tls=calling).connect(server.address)
    stream = channel.stream(METHODS["Bidi"])
    for round_ in range(5):
        made(tmp_path, f"host{round_}")
        assert calling.refresh()
        await stream.write(text(str(round_)))
        assert (await stream.read()).text == str(round_)
        assert (await channel.call(METHODS["Unary"], text("hi"), timeout=5)).text == "hi"
    assert (serving.generation, calling.generation) == (5, 5)
    await stream.close_send()
    assert await stream.read() is None
    await channel.close()
    await server.stop(0)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    files, other = made(tmp_path / "a"), made(tmp_path / "b")
    for wrong, told in (
        (TlsFiles(tmp_path / "none", files.key), "none: No such file"),
        (TlsFiles(files.cert, other.key), "the key is not the certificate's"),
        (TlsFiles(files.key, files.key), "service.key"),
        (TlsFiles(files.cert, files.key, files.key), "service.key"),
    ):
        with pytest.raises(TlsError, match=told):
            Tls(wrong)
    with pytest.raises(TlsError, match="given together"):
        TlsFiles(files.cert)
    with pytest.raises(TlsError, match="no authority"):
        Tls(TlsFiles(files.cert, files.key), asks_clients=True)


def test_half_of_an_exchange_leaves_the_old_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, other = made(tmp_path / "a"), made(tmp_path / "b")
    assert files.key is not None
    assert other.key is not None
    tls = Tls(files)
    assert not tls.refresh()
    files.key.write_bytes(other.key.read_bytes())
    assert not tls.refresh()
    assert "the old ones stay" in caplog.text
    assert tls.generation == 0
    made(tmp_path / "a")
    assert tls.refresh()
    assert tls.generation == 1


def test_http_takes_new_certificates(tmp_path: Path) -> None:
    files = made(tmp_path)
    tls = Tls(files)
    context = tls.server_context()
    before = _presented(context, tmp_path / certs.CA)
    made(tmp_path)
    assert _presented(context, tmp_path / certs.CA) == before
    assert tls.refresh()
    assert _presented(context, tmp_path / certs.CA) != before


def test_handshakes_go_on_while_another_thread_exchanges_certificates(tmp_path: Path) -> None:
    files = made(tmp_path)
    tls = Tls(files)
    context = tls.server_context()

    def exchange() -> None:
        for _ in range(200):
            now = time.time_ns()
            for path in files.all:
                os.utime(path, ns=(now, now))
            tls.refresh()

    thread = threading.Thread(target=exchange)
    thread.start()
    while thread.is_alive():
        assert _presented(context, tmp_path / certs.CA)
    assert tls.generation > 100


def test_http_is_trusted_by_nobody_with_a_certificate_of_the_past(tmp_path: Path) -> None:
    files = made(tmp_path, now=NOW - datetime.timedelta(days=400))
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        _presented(Tls(files).server_context(), tmp_path / certs.CA)


def _presented(server: ssl.SSLContext, ca: Path) -> bytes | None:
    """The certificate that a handshake in memory shows."""
    client = ssl.create_default_context(cafile=str(ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return here.getpeercert(binary_form=True)
