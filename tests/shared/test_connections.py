"""Connections at a port: strangers' are few, one key's do not take another's, and who is cut off hears it."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.errors import ManyloraError
from manylora_shared.transport import connections as module
from manylora_shared.transport.base import ServerCall, Service
from manylora_shared.transport.connections import Connections, fair_level, room
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.shared.transport_echo import METHODS, echo_service, text


class Port:
    """A listener in this process, and both ends of its connections."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.held = ExitStack()
        self.listener = self.held.enter_context(socket.socket(family))
        self.listener.bind(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0))
        self.listener.listen()
        self.number = int(self.listener.getsockname()[1])

    def dial(self) -> tuple[socket.socket, str]:
        """The caller's end, and its name at the other."""
        ours = self.held.enter_context(socket.socket(self.listener.family))
        ours.connect(self.listener.getsockname())
        ours.setblocking(False)
        self.held.enter_context(self.listener.accept()[0])
        host, number = ours.getsockname()[:2]
        return ours, f"ipv6:%5B{host}%5D:{number}" if ":" in host else f"ipv4:{host}:{number}"


def is_cut(ours: socket.socket) -> bool:
    try:
        return ours.recv(1) == b""
    except BlockingIOError:
        return False


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_a_fair_level_fits_and_takes_from_nobody_below_an_equal_share(counts: list[int], capacity: int) -> None:
    level = fair_level(counts, capacity)
    if level is None:
        assert sum(counts) <= capacity
        return
    assert sum(min(n, level) for n in counts) <= capacity < sum(counts)
    assert level >= capacity // len(counts)


async def test_strangers_beyond_their_bound_are_cut_off_the_oldest_first_but_not_at_once() -> None:
    port, found = Port(), Connections(capacity=100, max_strangers=2)
    with port.held:
        strangers = [port.dial()[0] for _ in range(5)]
        ours, name = port.dial()
        found.vouch(name, "acme")
        assert await found.sweep(port.number) == {}  # a key may still come
        late = port.dial()[0]
        assert await found.sweep(port.number) == {"": 4}
        assert sorted(map(is_cut, strangers)) == [False, True, True, True, True]
        assert not is_cut(late)
        assert not is_cut(ours)
        for each in strangers:
            each.close()


async def test_one_tenants_connections_do_not_take_anothers() -> None:
    port, found = Port(), Connections(capacity=6, max_strangers=0)
    with port.held:
        others = [port.dial() for _ in range(2)]
        greedy = [port.dial() for _ in range(10)]
        for _, name in others:
            found.vouch(name, "acme")
        for _, name in greedy:
            found.vouch(name, "greedy")
        assert await found.sweep(port.number) == {"greedy": 6}
        assert not any(is_cut(ours) for ours, _ in others)
        assert sum(is_cut(ours) for ours, _ in greedy) == 6


async def test_one_connection_is_cut_off_by_its_name() -> None:
    port, found = Port(), Connections(capacity=6)
    with port.held:
        ours, name = port.dial()
        other, _ = port.dial()
        await found.sweep(port.number)
        found.cut(name)
        assert is_cut(ours)
        assert not is_cut(other)


async def test_where_no_file_is_left_there_is_room_again() -> None:
    port, found = Port(), Connections(capacity=100, max_strangers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with port.held:
        strangers = [port.dial()[0] for _ in range(8)]
        await found.sweep(port.number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, hard))
        try:
            with ExitStack() as taken:
                while True:
                    try:
                        taken.callback(os.close, os.dup(0))
                    except OSError:
                        break
                assert await found.sweep(port.number) == {"": 6}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sum(map(is_cut, strangers)) == 6


async def test_what_ended_is_forgotten_and_a_later_one_of_its_name_is_a_stranger() -> None:
    port, found = Port(), Connections(capacity=6)
    found.vouch("ipv4:127.0.0.1:1", "acme")
    with port.held:
        await found.sweep(port.number)
        await found.sweep(port.number)
        assert found._owners == {}
        other = Port()
        with other.held:
            other.dial()
            await found.sweep(port.number)
            assert not [seen for seen in found._files.values() if seen.peer is not None], "of another port"


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("0.0.0.0", "127.0.0.1"),
        ("[::]", "127.0.0.1"),
        ("[::]", "[::1]"),
    ],
)
async def test_grpc_names_a_connection_as_its_socket_does(address: str, dialled: str) -> None:
    peers: list[str] = []

    async def unary(request: object, call: ServerCall) -> object:
        peers.append(call.peer)
        return text("")

    try:
        server = await GrpcTransport().serve(f"{address}:0", [echo_service(Unary=unary)])
    except OSError:
        pytest.skip("there is no IPv6 here")
    port = int(server.address.rpartition(":")[2])
    channel = GrpcTransport().connect(f"{dialled}:{port}")
    try:
        await channel.call(METHODS["Unary"], text(""))
        found = [peer for fd in map(int, os.listdir("/dev/fd")) if (peer := module._peer_of(fd, port)) is not None]
        assert found == peers
    finally:
        await channel.close()
        await server.stop(0)


class KeyGate:
    """Lets in, as acme's, whoever says so."""

    max_message_bytes = 100

    async def before_entering(self, call: ServerCall) -> Callable[[], KeyGate]:
        def enter() -> KeyGate:
            self.owner = call.metadata.get("owner", "")
            return self

        return enter

    async def before_refusal(self, call: ServerCall, refusal: ManyloraError) -> None:
        pass

    def slow(self) -> Callable[[], None]:
        return lambda: None

    async def before_parsing(self, size_bytes: int) -> None:
        pass

    def release(self) -> None:
        pass


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(module, "SWEEP_S", 0.05)
    monkeypatch.setattr(module.Connections.__init__, "__defaults__", (4,))
    echo = echo_service()
    server = await GrpcTransport().serve("127.0.0.1:0", [Service(echo.descriptor, echo.handlers, gate=KeyGate())])
    yield server.address
    await server.stop(0)


async def test_strangers_connections_leave_a_keyed_one_alone(served: str) -> None:
    host, _, port = served.rpartition(":")
    channel = GrpcTransport().connect(served)
    assert (await channel.call(METHODS["Unary"], text("first"), metadata={"owner": "acme"})).text == "first"
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(30)]

    async def ended(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    endings = {asyncio.create_task(ended(reader)) for reader, _ in strangers}
    left = endings
    while len(left) > 4:
        done, left = await asyncio.wait(left, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done
    # One that lost its connection would come from another port.
    assert channel.is_ready()  # type: ignore[attr-defined]
    assert (await channel.call(METHODS["Unary"], text("again"), metadata={"owner": "acme"})).text == "again"
    for task in endings:
        task.cancel()
    for _, writer in strangers:
        writer.close()
    await channel.close()


def test_a_server_has_room_for_half_of_the_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1_000), hard))
        assert room() == min(module.MAX_CONNECTIONS, hard // 2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
