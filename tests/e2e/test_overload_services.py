"""Overload touches who causes it alone, through real services: three tenants within their shares, one in each class,
beside one that asks for far more than a worker with the fake engine can do.

`--fairness-seconds N` is how long each case lasts; in 60 s each of the three sends 1,000 requests and more.
"""

from __future__ import annotations

import asyncio
import collections
import multiprocessing
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, Delta, RequestFailed, Sampling
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.ids import QosClass
from manylora_sim.fake_runner import reference_tokens

from bench.isolation_traffic import ATTACKS, Target, attack_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ATTACKER = "attacker"
SLOTS, STEP_MS = 64, 10
STREAMS, PERIOD_S = 9, 0.5
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
SETTLE_S = 12.0  # POLICY.md: the leader has served for 10 s
GRACE_S = 60.0  # for an answer, on a machine with other work
GREEDY = Sampling(temperature=0.0)
NEVER_S = 10_000.0
PATIENT, PROMPTS = ATTACKS["patient-outputs"], ATTACKS["patient"]
SHAPES = {
    "long outputs": PATIENT,
    "long prompts": PROMPTS,
    "choices": replace(PATIENT, max_tokens=400, n=8),
    "long outputs, sent once and waited for": replace(PATIENT, refused_pause_s=NEVER_S),
    "long prompts, sent once and waited for": replace(PROMPTS, refused_pause_s=NEVER_S),
    "of all classes": replace(PATIENT, max_tokens=400, all_classes=True),
}


@dataclass
class Seen:
    """What one tenant's requests came to."""

    right: int = 0
    wrong: int = 0
    failed: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        return self.right + self.wrong + self.failed.total()


async def ask(client: Client, qos_class: QosClass, seconds: float, at_least: int = 0) -> Seen:
    """Closed loops in the name of a tenant, each asking twice a second at most for what nobody asked before."""
    seen = Seen()
    ends_at = asyncio.get_running_loop().time() + seconds

    async def loop(index: int) -> None:
        rng = random.Random(f"{qos_class} {index} {seconds}")
        await asyncio.sleep(PERIOD_S * index / STREAMS)
        while (began := asyncio.get_running_loop().time()) < ends_at or seen.total < at_least:
            prompt = [3 + byte % 250 for byte in rng.randbytes(PROMPT_TOKENS)]
            await _answer(client, qos_class, prompt, seen)
            await asyncio.sleep(max(0.0, began + PERIOD_S - asyncio.get_running_loop().time()))

    async with asyncio.TaskGroup() as tasks:
        for index in range(STREAMS):
            tasks.create_task(loop(index))
    return seen


async def _answer(client: Client, qos_class: QosClass, prompt: list[int], seen: Seen) -> None:
    named: dict[str, Any] = {"tenant": qos_class.value, "qos_class": qos_class.value, "sampling": GREEDY}
    tokens: list[int] = []
    try:
        async with client.generate(
            prompt, **named, max_tokens=OUTPUT_TOKENS, ignore_eos=True, timeout_s=GRACE_S
        ) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    tokens += event.token_ids
    except RequestFailed as failure:
        seen.failed[str(failure)] += 1
        return
    if tokens == reference_tokens(prompt, None, 0, 0, OUTPUT_TOKENS, greedy=True):
        seen.right += 1
    else:
        seen.wrong += 1


@asynccontextmanager
async def served(data: Path, workers: int) -> AsyncIterator[tuple[LocalCluster, Client]]:
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=data,
        workers=workers,
        worker_module="manylora_sim.worker",
        worker_flags=(f"--fake-step-ms={STEP_MS}", f"--sequence-slots={SLOTS // workers}", "--num-blocks=9000"),
        scheduler_module="manylora_sim.scheduler",
    )
    async with LocalCluster(options) as cluster, Client(cluster.router, retry=None) as client:
        for tenant in (ATTACKER, *(qos_class.value for qos_class in QosClass)):
            await client.tenants.apply(f"tenant_id: {tenant}\n")
        yield cluster, client


async def beside(
    cluster: LocalCluster, client: Client, shape: str, qos_class: QosClass, seconds: float
) -> tuple[dict[QosClass, Seen], Mapping[str, int], int]:
    """What the three saw, how the attacker's requests ended, and the most that it had waiting."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    target = Target(cluster.router, read_key(cluster.key_file), ATTACKER, qos_class.value)
    child = multiprocessing.get_context("spawn").Process(
        target=attack_process, args=(SHAPES[shape], target, [""], there), daemon=True
    )
    child.start()
    there.close()
    waiting = 0
    try:
        at_least = 1000 if seconds >= 60 else 0
        asking = [asyncio.create_task(ask(client, each, seconds, at_least)) for each in QosClass]
        while not all(task.done() for task in asking):
            await asyncio.wait(asking, timeout=0.5)
            flows = (await client.status()).scheduler.flows
            waiting = max(waiting, sum(flow.queued for flow in flows if flow.tenant_id == ATTACKER))
        here.send("stop")
        _, outcomes = await asyncio.to_thread(here.recv)
    finally:
        child.kill()
        await asyncio.to_thread(child.join)
    return dict(zip(QosClass, [await task for task in asking], strict=True)), outcomes, waiting


async def wait_empty(client: Client) -> None:
    async with asyncio.timeout(GRACE_S):
        while True:
            status = await client.status()
            if not status.scheduler.flows and not any(worker.running for worker in status.workers):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shape", list(SHAPES))
async def test_nobody_within_its_share_is_refused(
    shape: str, workers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seconds = float(request.config.getoption("--fairness-seconds"))
    async with served(tmp_path, workers) as (cluster, client):
        for seen in await asyncio.gather(*(ask(client, each, SETTLE_S) for each in QosClass)):
            assert (seen.wrong, seen.failed) == (0, {}), "with nobody beside them"
        for attackers in QosClass if not SHAPES[shape].all_classes else (QosClass.STANDARD,):
            found, outcomes, waiting = await beside(cluster, client, shape, attackers, seconds)
            told = {each.value: seen.right for each, seen in found.items()}
            print(
                f"\n{shape}, {attackers.value}, {workers} workers: right {told}; attacker {outcomes}, {waiting} queued"
            )
            assert waiting + outcomes.get("RESOURCE_EXHAUSTED", 0) > SLOTS, "the attack is none"
            for each, seen in found.items():
                assert (seen.wrong, seen.failed) == (0, {}), f"{each.value} beside {shape} of {attackers.value}"
            await wait_empty(client)
