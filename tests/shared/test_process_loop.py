"""The services' event loop: its clock, and timers on it."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from manylora_shared.process import loop as service_loop
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.shared.transport_echo import METHODS, echo_service, text


def test_its_time_is_the_monotonic_clock_read_anew() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, service_loop.ServiceLoop)
        before, read, after = time.monotonic(), loop.time(), time.monotonic()
        assert before <= read <= after
        while time.monotonic() == after:
            pass
        assert loop.time() > read  # within one pass of the loop

    service_loop.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_no_timer_ends_before_its_time(seed: int) -> None:
    rng = random.Random(seed)
    ended: list[tuple[float, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(when: float) -> None:
            ended.append((when, time.monotonic()))

        for _ in range(100):
            delay_s = rng.uniform(0.0, 0.02)
            if rng.random() < 0.5:
                when = loop.time() + delay_s
                loop.call_at(when, note, when)
            else:
                when = time.monotonic() + delay_s
                loop.call_later(delay_s, note, when)
            await asyncio.sleep(rng.uniform(0.0, 0.0005))
        began = time.monotonic()
        await asyncio.sleep(0.025)
        assert time.monotonic() - began >= 0.025

    service_loop.run(main())
    assert len(ended) == 100
    assert all(at >= when for when, at in ended)


@pytest.mark.parametrize("delay_s", [-1.0, 0.0])
def test_what_is_due_is_called_in_the_next_pass(delay_s: float) -> None:
    called: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + delay_s, called.append, "at")
        loop.call_later(delay_s, called.append, "later")
        assert called == []
        await asyncio.sleep(0)
        assert called == ["at", "later"]

    service_loop.run(main())


@pytest.mark.parametrize("form", ["at", "later"])
def test_what_is_cancelled_is_not_called(form: str) -> None:
    called: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        set_timer: dict[str, Callable[..., Any]] = {"at": loop.call_at, "later": loop.call_later}
        now = loop.time() if form == "at" else 0.0
        for delay_s in (0.0, 0.002):
            set_timer[form](now + delay_s, called.append, "cancelled").cancel()
        set_timer[form](now + 0.002, called.append, "not cancelled")
        await asyncio.sleep(0.01)
        assert called == ["not cancelled"]

    service_loop.run(main())


def test_a_wait_without_end_may_be_set() -> None:
    async def main() -> None:
        timer = asyncio.get_running_loop().call_later(float("inf"), print)
        await asyncio.sleep(0)
        timer.cancel()

    service_loop.run(main())


def test_it_returns_what_main_does_and_raises_what_it_raises() -> None:
    async def main(*, fails: bool) -> int:
        if fails:
            raise KeyError("x")
        return 7

    assert service_loop.run(main(fails=False)) == 7
    with pytest.raises(KeyError):
        service_loop.run(main(fails=True))


def test_grpcs_handler_is_told_once_of_all_that_has_come() -> None:
    told, thread = socket.socketpair()
    with told, thread:
        told.setblocking(False)
        read: list[bytes] = []
        for count in (1, 2, 250):
            thread.send(b"1" * count)
            service_loop._told_once(told, lambda: read.append(told.recv(1)))
            with pytest.raises(BlockingIOError):
                told.recv(1)
        assert read == [b"1"] * 3


def test_grpcs_thread_tells_the_loop_in_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told_once, times = service_loop._told_once, []

    def counted(told: socket.socket, handle: Callable[[], object]) -> None:
        times.append(1)
        told_once(told, handle)

    monkeypatch.setattr(service_loop, "_told_once", counted)

    async def main() -> None:
        server = await GrpcTransport().serve("127.0.0.1:0", [echo_service()])
        channel = GrpcTransport().connect(server.address)
        answer = await channel.call(METHODS["Unary"], text("x"))
        assert answer.text == "x"
        await channel.close()
        await server.stop(0)

    service_loop.run(main())
    assert times
