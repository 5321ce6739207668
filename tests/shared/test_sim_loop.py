"""The simulation's loop: virtual time, order by seed, determinism, nodes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from manylora_sim.loop import SimDeadlock, SimLimit, SimLoop, SimWallClock, run

SHARED = Path(__file__).resolve().parents[2] / "shared"


def sim() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


async def workload() -> list[int]:
    """Tasks, timers, sets of tasks, timeouts and cancellations: what services are made of."""
    order: list[int] = []
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def produce(number: int) -> None:
        for i in range(5):
            await asyncio.sleep(0.01 * (number % 3))
            await queue.put(number * 10 + i)

    async def consume() -> None:
        while True:
            order.append(await queue.get())

    consumers = {asyncio.create_task(consume()) for _ in range(3)}
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(produce(number))
    for consumer in consumers:  # a set: its order must not depend on addresses
        consumer.cancel()
    await asyncio.wait(consumers)
    try:
        async with asyncio.timeout(1.5):
            await asyncio.Event().wait()
    except TimeoutError:
        order.append(-1)
    return order


def test_time_is_virtual_and_jumps() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        clock = SimWallClock(loop, 1000.0)
        await asyncio.sleep(3000)
        assert clock.now_unix_s() == 4000.0
        clock.jump(-50)
        assert clock.now_unix_s() == 3950.0
        return loop.time()

    done = run(main(), seed=1)
    assert done.result == done.virtual_s == 3000.0


def test_one_seed_is_one_run_and_seeds_differ() -> None:
    runs = [run(workload(), seed=seed) for seed in (1, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert len({r.digest for r in runs}) == 3
    assert len({tuple(r.result) for r in runs}) > 1
    assert all(sorted(r.result) == sorted(runs[0].result) for r in runs)


def test_runs_are_equal_in_processes_with_other_hash_seeds() -> None:
    program = (
        "from test_sim_loop import workload; from manylora_sim.loop import run; "
        "r = run(workload(), seed=5); print(r.digest, r.events)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{SHARED}:{Path(__file__).parent}"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    here = run(workload(), seed=5)
    assert found == {f"{here.digest} {here.events}\n"}


def test_effects_never_run_before_their_causes() -> None:
    async def main() -> list[str]:
        log: list[str] = []
        loop = asyncio.get_running_loop()

        def cause(name: str) -> None:
            log.append(name)
            loop.call_soon(log.append, name + "'")

        for name in "abcdef":
            loop.call_soon(cause, name)
        await asyncio.sleep(1)
        return log

    for seed in range(20):
        log = run(main(), seed=seed).result
        assert sorted(log[:6]) == list("abcdef")
        assert all(log.index(name) < log.index(name + "'") for name in "abcdef")


def test_what_arrives_happens_in_order_of_time_and_is_no_event() -> None:
    async def main(arrivals: list[float]) -> list[tuple[float, str]]:
        loop = sim()
        seen: list[tuple[float, str]] = []
        for at in arrivals:
            loop.arrive_at(at, lambda: seen.append((loop.time(), "arrival")))
        loop.call_at(2.0, lambda: seen.append((loop.time(), "timer")))
        loop.arrive_at(2.0, lambda: seen.append((loop.time(), "arrival")))
        woken = loop.create_future()
        loop.arrive_at(4.0, lambda: woken.set_result(None))
        await woken
        seen.append((loop.time(), "woken"))
        return seen

    few, many = run(main([]), seed=1), run(main([3.0, 1.0, 1.0]), seed=1)
    assert few.result == [(2.0, "arrival"), (2.0, "timer"), (4.0, "woken")]
    assert many.result == [(1.0, "arrival")] * 2 + few.result[:2] + [(3.0, "arrival"), (4.0, "woken")]
    assert (few.events, few.digest) == (many.events, many.digest)


def test_the_end_of_a_sleep_wakes_a_paused_node_when_it_goes_on() -> None:
    async def main() -> list[float]:
        times: list[float] = []

        async def process() -> None:
            async with asyncio.timeout(5.0):
                await asyncio.sleep(1.0)
            times.append(asyncio.get_running_loop().time())

        node = sim().node("a")
        node.start(process())
        await asyncio.sleep(0.5)
        node.pause()
        await asyncio.sleep(2.0)
        node.resume()
        await asyncio.sleep(1.0)
        return times

    assert run(main(), seed=2).result == [2.5]


def test_a_deadlock_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimDeadlock, match="main"):
        run(main(), seed=1)


def test_bounds_of_time_and_events() -> None:
    async def sleeps() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def spins() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(SimLimit, match="virtual"):
        run(sleeps(), seed=1, limit_s=10)
    with pytest.raises(SimLimit, match="events"):
        run(spins(), seed=1, max_events=500)


def test_threads_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="no threads"):
            await asyncio.to_thread(print)
        loop = asyncio.get_running_loop()
        raised: list[Exception] = []

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as e:
                raised.append(e)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert len(raised) == 1

    run(main(), seed=1)


def test_exceptions_that_nobody_handles_fail_the_run() -> None:
    async def main() -> None:
        def broken() -> None:
            raise KeyError("lost")

        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup, match="seed 1") as caught:
        run(main(), seed=1)
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_what_main_leaves_is_cancelled() -> None:
    ended: list[int] = []

    async def leaves() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            ended.append(1)

    tasks: list[Any] = []

    async def main() -> None:
        tasks.append(asyncio.create_task(leaves()))
        await asyncio.sleep(1)

    run(main(), seed=1)
    assert ended == [1]


def test_many_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop: Any = asyncio.get_running_loop()
        for _ in range(2000):
            loop.call_later(1000, print).cancel()
            await asyncio.sleep(0.001)
        return len(loop._scheduled)

    assert run(main(), seed=1).result < 500


def test_killing_a_node_ends_its_tasks_and_callbacks_alone() -> None:
    async def main() -> None:
        ticks: dict[str, int] = {"a": 0, "b": 0}
        ended: list[str] = []

        async def child(name: str) -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    ticks[name] += 1
            finally:
                ended.append(name)

        async def process(name: str) -> None:
            asyncio.get_running_loop().call_later(100, ended.append, name + " timer")
            async with asyncio.TaskGroup() as tasks:
                for _ in range(2):
                    tasks.create_task(child(name))

        a, b = sim().node("a"), sim().node("b")
        a.start(process("a"))
        b.start(process("b"))
        await asyncio.sleep(10.5)
        assert len(a.tasks) == 3
        await a.kill()
        assert (list(a.tasks), a.is_dead, ended) == ([], True, ["a", "a"])
        await asyncio.sleep(100)
        assert ticks == {"a": 20, "b": 220}
        assert ended == ["a", "a", "b timer"]

    run(main(), seed=3)


def test_a_paused_node_stands_still_and_goes_on() -> None:
    async def main() -> None:
        times: list[float] = []

        async def process() -> None:
            while True:
                await asyncio.sleep(1)
                times.append(asyncio.get_running_loop().time())

        node = sim().node("a")
        node.start(process())
        await asyncio.sleep(2.5)
        node.pause()
        await asyncio.sleep(10)
        assert times == [1.0, 2.0]
        node.resume()
        await asyncio.sleep(1.25)
        assert times == [1.0, 2.0, 12.5, 13.5]
        node.pause()
        await node.kill()

    run(main(), seed=4)


def test_the_digest_counts_events_of_the_simulation() -> None:
    async def main(event: str) -> None:
        sim().trace(event)

    assert run(main("x"), seed=1).digest != run(main("y"), seed=1).digest
