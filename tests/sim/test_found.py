"""Bugs that the simulation found, each in the smallest form that shows it."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

from manylora_router.links.channels import WorkerChannels
from manylora_scheduler.serving.term import Term
from manylora_sim.loop import run
from manylora_sim.network import MemoryNetwork

from tests.sim.cluster import Cluster


def test_a_channel_to_a_worker_that_has_left_is_closed_after_use() -> None:
    """A grant of a scheduler that has not heard yet left a channel open until the next change of the pool."""

    async def main() -> None:
        channels = WorkerChannels(MemoryNetwork(random.Random(0)).transport("router"))
        channels.retain(["127.0.0.1:1"])
        channels.acquire("127.0.0.1:1")
        channels.retain([])
        channels.release("127.0.0.1:1")
        channels.acquire("127.0.0.1:1")
        channels.release("127.0.0.1:1")
        assert len(channels) == 0
        await channels.close()

    run(main(), seed=0)


def test_waiting_for_a_moment_ends_though_another_timer_is_a_hair_before_it() -> None:
    """Timers that fired a nanosecond early left their waiters a rest of time in which the clock did not move."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        until = loop.time() + 1.0
        loop.call_at(until - 4e-10, lambda: None)
        rounds = 0
        while loop.time() < until:
            rounds += 1
            assert rounds < 10
            await asyncio.sleep(until - loop.time())
        return rounds

    assert run(main(), seed=0).result == 1


def test_a_leader_that_is_over_leaves_nothing_in_memory() -> None:
    """The error with which it ended its routers' streams was one object, raised again and again: it kept every frame
    that it ever came through, and those what the streams had carried."""

    async def main() -> weakref.ref[Term]:
        cluster = Cluster(0, schedulers=1)
        await cluster.start()
        while not cluster.leaders():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (leader,) = cluster.leaders()
        assert leader.term is not None
        term = weakref.ref(leader.term)
        for kind in ("scheduler", "router", "worker"):
            for name in cluster.names(kind):
                await cluster.stop(cluster.processes[name])
        return term

    found = run(main(), seed=0).result
    gc.collect()
    assert found() is None
