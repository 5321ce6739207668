"""The run itself: sends what is planned when it is due, however long answers take, and keeps the count.

A request that is sent late, because this process was busy or `max_running` others were running, is late by the
server's callers' clock too: its times begin when it was due. So a server that stands still does not lessen the load
that it is judged by (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from random import Random

from manylora.load.endpoint import Endpoint
from manylora.load.planning.mix import Mix
from manylora.load.planning.schedule import Loop, Planned, closed_loops, open_loop
from manylora.load.tally import Histogram, Sample, Tally

UNFINISHED = "unfinished at the end"


class Run:
    """began_s: None until it does. late: of requests that had a time, how much after it they were sent."""

    def __init__(self, mix: Mix, endpoint: Endpoint, *, max_running: int, drain_s: float) -> None:
        self.mix = mix
        self.tallies = {tenant.name: Tally() for tenant in mix.tenants}
        self.total = Tally()
        self.late = Histogram()
        self.began_s: float | None = None
        self.counted_s = 0.0  # for how long what is counted was sent, and answered
        self.cpu_part = 0.0  # of one core, of this process
        self._endpoint = endpoint
        self._drain_s = drain_s
        self._room = asyncio.Semaphore(max_running)
        self._tasks: dict[asyncio.Task[None], Sample] = {}
        self._sending: asyncio.Task[None] | None = None
        self._last_end_s = 0.0
        self._ended_tokens = 0

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def tokens(self) -> int:
        """Until now, the warm-up's too; of what runs, the events."""
        return self._ended_tokens + sum(sample.chunks for sample in self._tasks.values())

    async def run(self) -> None:
        """Until all is answered, or for `drain_s` after the last was sent."""
        self.began_s, cpu_s = time.perf_counter(), time.process_time()
        self._sending = asyncio.create_task(self._send_all())
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending
        sent_until_s = time.perf_counter()
        if self._tasks and not self._sending.cancelled():
            await asyncio.wait(self._tasks, timeout=self._drain_s)
        for task, sample in list(self._tasks.items()):
            task.cancel()
            sample.error = UNFINISHED
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cpu_part = (time.process_time() - cpu_s) / (time.perf_counter() - self.began_s)
        ended_s = max(sent_until_s, self._last_end_s)
        self.counted_s = max(1e-9, ended_s - self.began_s - self.mix.warmup_s)

    def stop(self) -> None:
        """What runs is not waited for."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        left = itertools.count() if self.mix.requests is None else iter(range(self.mix.requests))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_open(open_loop(self.mix), left))
            for number, loop in enumerate(closed_loops(self.mix)):
                for stream in range(loop.streams):
                    group.create_task(self._send_closed(loop, left, Random(f"{self.mix.seed}/{number}/{stream}")))

    async def _send_open(self, requests: Iterator[Planned], left: Iterator[int]) -> None:
        assert self.began_s is not None
        for planned in requests:
            if next(left, None) is None:
                return
            due_s = self.began_s + planned.at_s
            wait_s = due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self._room.acquire()
            self.late.add(max(0.0, time.perf_counter() - due_s))
            self._start(Sample(planned, due_s))

    async def _send_closed(self, loop: Loop, left: Iterator[int], rng: Random) -> None:
        assert self.began_s is not None
        ends_s = self.began_s + self.mix.duration_s if self.mix.duration_s is not None else None
        while (ends_s is None or time.perf_counter() < ends_s) and next(left, None) is not None:
            await self._room.acquire()
            task = self._start(Sample(next(loop.requests), time.perf_counter()))
            await asyncio.wait([task])
            if loop.think_s:
                await asyncio.sleep(rng.expovariate(1 / loop.think_s))

    def _start(self, sample: Sample) -> asyncio.Task[None]:
        self.tallies[sample.planned.tenant.name].running += 1
        task = asyncio.create_task(self._one(sample))
        self._tasks[task] = sample
        return task

    async def _one(self, sample: Sample) -> None:
        assert self.began_s is not None
        tally = self.tallies[sample.planned.tenant.name]
        try:
            await self._endpoint.send(sample)
        except Exception as error:
            sample.error = f"{type(error).__name__} in this process"
            raise
        finally:
            self._room.release()
            task = asyncio.current_task()
            assert task is not None
            del self._tasks[task]
            tally.running -= 1
            self._ended_tokens += sample.tokens
            self._last_end_s = max(self._last_end_s, time.perf_counter() if not sample.error else 0.0)
            if sample.due_s - self.began_s >= self.mix.warmup_s:
                for each in (tally, self.total):
                    each.add(sample)
