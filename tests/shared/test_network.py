"""The in-memory network's faults, in virtual time, and its determinism."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from manylora_shared.errors import Code, RpcError
from manylora_sim.loop import SimLoop, SimRun, run
from manylora_sim.network import MemoryNetwork
from manylora_sim.network_wire import DETECT_MAX_S, DETECT_MIN_S

from tests.shared.transport_echo import METHODS, echo_service, text

SEEDS = range(10)


def now() -> float:
    return asyncio.get_running_loop().time()


class World:
    """A server node that streams a number each 100 ms, and a client node."""

    def __init__(self, seed: int) -> None:
        self.network = MemoryNetwork(random.Random(seed), min_delay_s=0.001, max_delay_s=0.01)
        self.ended_at: list[float] = []
        self.received: list[str] = []

    async def open(self) -> None:
        self.server = await self.network.transport("server").serve(
            "10.0.0.1:0", [echo_service(ServerStream=self._count)]
        )
        self.channel = self.network.transport("client").connect(self.server.address)

    async def _count(self, request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            number = 0
            while True:
                yield text(str(number))
                number += 1
                await asyncio.sleep(0.1)
        finally:
            self.ended_at.append(now())

    async def read(self, timeout: float | None = None) -> tuple[float, RpcError]:
        """Reads to the end. Returns when and how it ended."""
        stream = self.channel.stream(METHODS["ServerStream"], text(""), timeout=timeout)
        try:
            while True:
                self.received.append((await stream.read()).text)
        except RpcError as e:
            return now(), e

    def check_no_gap(self) -> None:
        assert self.received == [str(i) for i in range(len(self.received))]


def run_seeds(main: Callable[[World], Awaitable[None]]) -> list[SimRun[None]]:
    async def body(seed: int) -> None:
        world = World(seed)
        await world.open()
        await main(world)
        await asyncio.sleep(5)
        assert world.network.open_calls == 0
        world.check_no_gap()

    return [run(body(seed), seed=seed, limit_s=600) for seed in SEEDS]


@pytest.mark.parametrize("silently", [False, True])
def test_a_killed_server_is_unavailable(silently: bool) -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read())
        await asyncio.sleep(1)
        world.network.kill("server", silently=silently)
        killed_at = now()
        ended_at, error = await reading
        assert error.code is Code.UNAVAILABLE
        assert ended_at - killed_at <= (DETECT_MAX_S if silently else 0.01)
        assert not silently or ended_at - killed_at >= DETECT_MIN_S
        assert world.ended_at == [killed_at]
        assert len(world.received) >= 9
        with pytest.raises(RpcError) as caught:
            await world.channel.call(METHODS["Unary"], text(""))
        assert caught.value.code is Code.UNAVAILABLE
        await world.network.transport("server").serve(world.server.address, [echo_service()])
        assert (await world.channel.call(METHODS["Unary"], text("again"))).text == "again"

    run_seeds(main)


def test_a_killed_client_frees_the_server() -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read())
        await asyncio.sleep(1)
        world.network.kill("client")
        await reading
        await asyncio.sleep(0.05)
        assert len(world.ended_at) == 1
        with pytest.raises(RpcError, match="dead"):
            await world.channel.call(METHODS["Unary"], text(""))

    run_seeds(main)


def test_a_dropped_connection_ends_both_ends_at_once() -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read())
        await asyncio.sleep(1)
        world.network.drop_connections("client", "server")
        dropped_at = now()
        ended_at, error = await reading
        assert (ended_at, error.code) == (dropped_at, Code.UNAVAILABLE)
        assert world.ended_at == [dropped_at]
        assert (await world.channel.call(METHODS["Unary"], text("again"))).text == "again"

    run_seeds(main)


@pytest.mark.parametrize(("source", "target"), [("server", "client"), ("client", "server")])
def test_a_one_way_partition_is_noticed_by_both_ends(source: str, target: str) -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read())
        await asyncio.sleep(1)
        world.network.partition(source, target, both_ways=False)
        cut_at = now()
        ended_at, error = await reading
        assert error.code is Code.UNAVAILABLE
        assert DETECT_MIN_S <= ended_at - cut_at <= DETECT_MAX_S
        await asyncio.sleep(DETECT_MAX_S)
        assert DETECT_MIN_S <= world.ended_at[0] - cut_at <= DETECT_MAX_S
        started = now()
        with pytest.raises(RpcError) as caught:
            await world.channel.call(METHODS["Unary"], text(""))
        assert caught.value.code is Code.UNAVAILABLE
        assert now() - started <= DETECT_MAX_S
        world.network.heal()
        assert (await world.channel.call(METHODS["Unary"], text("again"))).text == "again"

    run_seeds(main)


def test_a_short_partition_only_delays() -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read())
        await asyncio.sleep(1)
        before = len(world.received)
        world.network.partition("client", "server")
        await asyncio.sleep(1.5)
        assert len(world.received) == before
        calling = asyncio.create_task(world.channel.call(METHODS["Unary"], text("held")))
        await asyncio.sleep(0.3)
        assert not calling.done()
        world.network.heal()
        await asyncio.sleep(DETECT_MAX_S)
        assert (await calling).text == "held"
        assert len(world.received) >= before + 40
        await world.channel.close()
        await reading

    run_seeds(main)


def test_a_cancellation_gets_through_after_a_short_partition() -> None:
    async def main(world: World) -> None:
        stream = world.channel.stream(METHODS["ServerStream"], text(""))
        await stream.read()
        world.network.partition("client", "server")
        stream.cancel()
        await asyncio.sleep(1)
        assert not world.ended_at
        world.network.heal()
        await asyncio.sleep(0.5)
        assert len(world.ended_at) == 1

    run_seeds(main)


def test_a_deadline_passes_through_a_partition() -> None:
    async def main(world: World) -> None:
        reading = asyncio.create_task(world.read(timeout=1.0))
        await asyncio.sleep(0.5)
        world.network.partition("client", "server")
        _, error = await reading
        assert error.code is Code.DEADLINE_EXCEEDED
        assert now() == 1.0

    run_seeds(main)


def test_handlers_belong_to_the_servers_node() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        node = loop.node("server")
        ended: list[str] = []

        async def handler(request: Any, call: Any) -> AsyncIterator[Any]:
            try:
                yield text("first")
                await asyncio.Event().wait()
            finally:
                ended.append("handler")

        addresses: asyncio.Queue[str] = asyncio.Queue()

        async def process() -> None:
            server = await network.transport("server").serve("10.0.0.1:0", [echo_service(ServerStream=handler)])
            await addresses.put(server.address)
            await asyncio.Event().wait()

        node.start(process())
        channel = network.transport("client").connect(await addresses.get())
        stream = channel.stream(METHODS["ServerStream"], text(""))
        await stream.read()
        assert len(node.tasks) == 2
        network.kill("server")
        await node.kill()
        assert ended == ["handler"]
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.UNAVAILABLE

    run(main(), seed=1)


def test_runs_repeat_exactly() -> None:
    async def main(world: World) -> None:
        reading = [asyncio.create_task(world.read()) for _ in range(1)]
        await asyncio.sleep(1)
        world.network.partition("server", "client", both_ways=False)
        await asyncio.wait(reading)
        world.network.heal()

    first, second = run_seeds(main), run_seeds(main)
    assert first == second
    assert len({r.digest for r in first}) == len(first)
