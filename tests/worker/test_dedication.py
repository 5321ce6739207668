"""A worker that is told whose requests to take: it changes when it is quiet, says so, and refuses everybody else."""

from __future__ import annotations

import asyncio

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code, InvalidRequest
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import reference_tokens
from manylora_worker.serving import dedication
from manylora_worker.serving.wire import dedication_owner

from tests.worker.worker_fakes import (
    CONTROL,
    OTHER_UID,
    UID,
    VALIDATE,
    Result,
    Worker,
    collect,
    config,
    eventually,
    message,
    refused,
    running_worker,
)

PROMPT = (5, 6, 7)


class Scheduler:
    def __init__(self, worker: Worker) -> None:
        self._stream = worker.channel.stream(CONTROL)
        self.told: list[tuple[str, str, bool, str]] = []

    async def begin(self) -> None:
        hello = worker_pb2.ControlHello(epoch=1, scheduler_id="s")
        await self._stream.write(worker_pb2.ControlCommand(hello=hello))
        await self.hear()

    async def hear(self) -> None:
        """The next report that tells of it."""
        while (report := await self._stream.read()) is not None:
            if report.HasField("dedication"):
                found = report.dedication
                self.told.append((found.adapter_uid, found.tenant_id, found.is_ready, found.problem))
                return

    async def dedicate(self, uid: str = "", tenant_id: str = "") -> None:
        command = worker_pb2.Dedicate(adapter_uid=uid, tenant_id=tenant_id)
        await self._stream.write(worker_pb2.ControlCommand(dedicate=command))

    async def until_ready(self) -> None:
        await self.hear()
        while not self.told[-1][2]:
            await self.hear()


async def check(worker: Worker, uid: str, request_id: str) -> None:
    result = await collect(worker.execute(message(request_id, adapter_uid=uid, max_tokens=20)))
    assert result.tokens[0] == reference_tokens(PROMPT, uid or None, 3, 0, 20)


async def begun(worker: Worker, request: worker_pb2.ExecuteRequest) -> asyncio.Task[Result]:
    task = asyncio.create_task(collect(worker.execute(request)))
    await eventually(lambda: bool(worker.engine.runtime.view.running))
    return task


async def unavailable(worker: Worker, request: worker_pb2.ExecuteRequest) -> None:
    assert (await refused(collect(worker.execute(request)))).code is Code.UNAVAILABLE


async def test_a_worker_merges_says_so_and_comes_back() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.begin()
        assert scheduler.told == [("", "", True, "")]
        running = await begun(worker, message("other", adapter_uid=OTHER_UID, max_tokens=300))
        await scheduler.dedicate(UID, "acme")
        await scheduler.hear()
        assert scheduler.told[-1] == (UID, "acme", False, "")
        for uid in (UID, OTHER_UID, ""):
            await unavailable(worker, message("r0", adapter_uid=uid))
        assert (await running).finished.outcome == common_pb2.OUTCOME_COMPLETED, "what runs goes to its end"
        await scheduler.until_ready()
        assert scheduler.told[-1] == (UID, "acme", True, "")
        await check(worker, UID, "r1")
        for uid in (OTHER_UID, ""):
            await unavailable(worker, message("r2", adapter_uid=uid))
        await unavailable(worker, message("r2", adapter_uid=UID, tenant_id="other"))
        trial = worker_pb2.ValidateAdapterRequest(path="incoming/x", tenant_id="acme", adapter_uid=OTHER_UID)
        assert (await refused(worker.channel.call(VALIDATE, trial))).code is Code.UNAVAILABLE
        await scheduler.dedicate()
        await scheduler.until_ready()
        for uid in (UID, OTHER_UID, ""):
            await check(worker, uid, f"r3{uid[:4]}")


async def test_what_does_not_end_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedication, "HAND_OVER_S", 0.2)
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.begin()
        running = await begun(worker, message("long", max_tokens=5000))
        await scheduler.dedicate(UID, "acme")
        assert (await running).finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        await scheduler.until_ready()
        await check(worker, UID, "r1")


async def test_one_that_is_not_merged_leaves_the_worker_to_everybody() -> None:
    async with running_worker() as worker:
        worker.engine.runner.unmergeable = [UID]
        scheduler = Scheduler(worker)
        await scheduler.begin()
        await scheduler.dedicate(UID, "acme")
        await scheduler.until_ready()
        assert scheduler.told[-1] == ("", "", True, "it is unmergeable")
        await check(worker, OTHER_UID, "r1")
        await scheduler.dedicate(OTHER_UID, "acme")
        await scheduler.until_ready()
        assert scheduler.told[-1] == (OTHER_UID, "acme", True, "")


def test_the_last_order_counts() -> None:
    async def play() -> None:
        async with running_worker(settings=config()) as worker:
            scheduler = Scheduler(worker)
            await scheduler.begin()
            for uid in (UID, OTHER_UID, "", UID, "", OTHER_UID):
                await scheduler.dedicate(uid, "acme")
                await asyncio.sleep(0.0005)
            while scheduler.told[-1] != (OTHER_UID, "acme", True, ""):
                await scheduler.hear()
            await check(worker, OTHER_UID, "r1")

    simulation.run(play(), seed=3)


def test_what_an_order_must_name() -> None:
    mine = "ab" * 32
    assert dedication_owner(worker_pb2.Dedicate()) is None
    assert dedication_owner(worker_pb2.Dedicate(adapter_uid=mine, tenant_id="acme")) == (mine, "acme")
    for uid, tenant in (("x", "acme"), (mine, ""), (mine, "No Name")):
        with pytest.raises(InvalidRequest):
            dedication_owner(worker_pb2.Dedicate(adapter_uid=uid, tenant_id=tenant))
