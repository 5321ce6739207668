"""A worker's registration and its end, in order and by a failure."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.errors import Code
from manylora_shared.transport.base import Stream, methods_of
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import reference_tokens
from manylora_sim.loop_runtime import LoopRuntime

from tests.worker.worker_fakes import (
    Scheduler,
    collect,
    config,
    eventually,
    make_engine,
    message,
    refused,
    running_worker,
)

LEAVE = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["LeavePool"]


async def test_registration_and_stop() -> None:
    async with running_worker() as worker:
        assert list(worker.store.keys) == [keys.worker("w")]
        stored = worker.store.get(keys.worker("w"))
        assert stored is not None
        record = json.loads(stored.value)
        assert record["address"] == worker.app.address
        assert (record["vocab_size"], record["eos_token_ids"], record["sequence_slots"]) == (259, [0], 8)
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        stream = worker.execute(message(max_tokens=8000))
        await stream.read()
        stopping = asyncio.create_task(worker.app.stop())
        await scheduler.read_until(lambda r: r.draining)
        result = await collect_finished(stream)
        assert result.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert result.message == "the worker is shutting down"
        await stopping
        assert list(worker.store.keys) == []


async def test_streams_are_handed_over_where_another_worker_stays() -> None:
    async with running_worker(settings=config(drain_s=60.0)) as worker:
        for name, is_leaving, digest in (("x", True, "same"), ("y", False, "another"), ("z", False, "same")):
            own = WorkerRecord.from_json(worker.store.get(keys.worker("w")).value)  # type: ignore[union-attr]
            record = replace(own, worker_id=name, is_leaving=is_leaving)
            record = record if digest == "same" else replace(record, model_digest=digest)
            await worker.store.client().put(keys.worker(name), record.to_json())
        stream = worker.execute(message(max_tokens=8000))
        frames = [await stream.read() for _ in range(3)]
        leaving = asyncio.create_task(worker.app.told_to_leave())
        await worker.channel.call(LEAVE, worker_pb2.LeavePoolRequest())
        await leaving
        assert (await refused(worker.execute(message("r2")).read())).code is Code.UNAVAILABLE
        stopping = asyncio.create_task(worker.app.stop())
        while frames[-1].WhichOneof("event") != "finished":
            frames.append(await stream.read())
        assert frames[-1].finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        told = [token for frame in frames for choice in frame.tokens.choices for token in choice.token_ids]
        assert told == reference_tokens((5, 6, 7), None, 3, 0, len(told))
        async with asyncio.timeout(10):
            await stopping
        assert list(worker.store.keys) == [keys.worker(name) for name in "xyz"]


async def collect_finished(stream: Stream) -> worker_pb2.ExecuteFinished:
    while (frame := await stream.read()) is not None:
        if frame.WhichOneof("event") == "finished":
            finished: worker_pb2.ExecuteFinished = frame.finished
    return finished


async def test_a_failed_engine_unregisters_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as worker:

        def fail(now: float) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(worker.engine.core, "begin_step", fail)
        lost = await refused(collect(worker.execute(message())))
        assert (lost.code, lost.message) == (Code.UNAVAILABLE, "the engine has failed: RuntimeError: unforeseen")
        assert await asyncio.wait_for(worker.app.failed(), 2) == "RuntimeError: unforeseen"
        await eventually(lambda: list(worker.store.keys) == [])
        assert (await refused(worker.execute(message()).read())).code is Code.UNAVAILABLE


def test_an_engine_that_stands_still_fails_the_worker_and_one_that_is_slow_does_not() -> None:
    async def main() -> None:
        step_s = 8.0
        settings = config(stall_s=10.0)
        engine = make_engine(settings)
        assert isinstance(engine.runtime, LoopRuntime)
        engine.runtime._step_s = lambda batch: step_s
        async with running_worker(settings=settings, engine=engine) as worker:
            scheduler = Scheduler(worker)
            await scheduler.hello(1)
            await collect(worker.execute(message(max_tokens=40)))
            await asyncio.sleep(60)  # at rest
            assert engine.runtime.view.failure is None
            step_s = 1e6
            stream, began_s = worker.execute(message()), asyncio.get_running_loop().time()
            lost = await refused(collect(stream))
            stood_s = asyncio.get_running_loop().time() - began_s
            assert (lost.code, "stood still" in lost.message) == (Code.UNAVAILABLE, True)
            assert 4 * 7 <= stood_s <= 4 * 8, "four times its longest step"
            assert "stood still" in await worker.app.failed()
            await scheduler.read_until(lambda report: report.draining)
            await asyncio.sleep(1)
            assert list(worker.store.keys) == []
            assert (await refused(worker.execute(message()).read())).code is Code.UNAVAILABLE

    simulation.run(main(), seed=1, limit_s=2000)
