"""The line to the scheduler: what waits outlives it, what ended is told later, and a refusal reaches its caller."""

from __future__ import annotations

import asyncio

from manylora.v1 import scheduler_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import SchedulerRecord
from manylora_shared.errors import Code
from router_fakes import (
    RouterCluster,
    read_all,
    say,
    simulate,
    text_request,
    until,
)


def test_scheduler_that_comes_back_gets_the_waiting_again() -> None:
    async def test(cluster: RouterCluster) -> None:
        scheduler = cluster.scheduler
        scheduler.holds = True
        asked = [asyncio.create_task(cluster.ask(text_request(f"p{i}"))) for i in range(5)]
        await until(lambda: len(scheduler.queued) == 5)
        order = [r.request_id for r in scheduler.enqueued]
        running = cluster.open(text_request(max_tokens=100))
        await asyncio.sleep(0.1)
        scheduler.grant(scheduler.enqueued[-1].request_id)
        await running.read()
        scheduler.queued.clear()
        scheduler.drop_lines()
        await until(lambda: len(scheduler.hellos) == 2 and len(scheduler.queued) == 5)
        assert [r.request_id for r in scheduler.enqueued][-5:] == order
        for request_id in order:
            scheduler.grant(request_id)
        answers = await asyncio.gather(*asked)
        assert all(a.error is None and a.text == "hello world" for a in answers)
        assert (await read_all(running)).error is None

    simulate(test)


def test_no_leader_then_a_leader_elsewhere() -> None:
    async def test(cluster: RouterCluster) -> None:
        assert cluster.scheduler.server is not None
        await cluster.store.delete(keys.SCHEDULER_LEADER)
        await cluster.scheduler.server.stop(0.0)
        asked = asyncio.create_task(cluster.ask(text_request()))
        await asyncio.sleep(5.0)
        assert not asked.done()
        await cluster.start_scheduler()
        answer = await asked
        assert answer.error is None
        assert answer.text == "hello world"

    simulate(test)


def test_line_moves_when_the_store_names_another_leader() -> None:
    async def test(cluster: RouterCluster) -> None:
        old = cluster.scheduler.hellos
        await until(lambda: bool(old))
        transport = cluster.network.transport("scheduler-1")
        server = await transport.serve("scheduler-1:0", [cluster.scheduler.service()])
        await cluster.store.put(keys.SCHEDULER_LEADER, SchedulerRecord("s1", server.address).to_json())
        await until(lambda: len(cluster.scheduler.hellos) == 2)
        assert (await cluster.ask(text_request())).text == "hello world"

    simulate(test)


def test_grants_closed_while_the_scheduler_is_away_are_told_later() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request(max_tokens=100))
        await stream.read()
        leader = await cluster.store.get(keys.SCHEDULER_LEADER)
        assert leader is not None
        await cluster.store.delete(keys.SCHEDULER_LEADER)
        cluster.scheduler.drop_lines()
        await asyncio.sleep(1.0)
        stream.cancel()
        await asyncio.sleep(10.0)
        assert cluster.scheduler.granted != {}
        await cluster.store.put(keys.SCHEDULER_LEADER, leader.value)
        await cluster.at_rest()

    simulate(test, script=say("x" * 1000, pause_s=0.01))


def test_refusal_of_the_scheduler_is_a_status_alone() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.refusal = scheduler_pb2.Refusal(
            code=int(Code.RESOURCE_EXHAUSTED), message="the queue is full", retry_after_s=2.0
        )
        answer = await cluster.ask(text_request())
        assert answer.frames == []
        assert answer.error is not None
        assert answer.error.code is Code.RESOURCE_EXHAUSTED
        assert answer.error.retry_after_s == 2.0
        assert cluster.app.calls.counters.rejected == 1

    simulate(test)
