"""What a tenant feels of its neighbour: a steady interactive victim alone, then beside an attacker of each kind.

Real processes on loopback, twice in one run: a cluster that schedules fairly and one that grants in order of arrival
(`--order arrival`, "fcfs" here), each with etcd, scheduler, router and one worker. Both tenants have the same weight.
The victim is a closed loop of few streams that asks for well under half of what the worker can do: each stream sends
its next request when the last one has ended and its period is over. The attacker keeps far more requests outstanding
than the worker has slots, from a process of its own with a lower priority, so that the victim's times are not those of
its event loop, nor of what making an attack takes of the cores: an attacker has a machine of its own.

    short          a flood of short requests
    long-prompts   a flood of the longest prompts
    long-outputs   the longest generations
    adapters       every request asks for the next of many adapters, far more than the device and the host hold
    slow-readers   long answers that are hardly read
    prefixes       every request begins with another long prefix, beside a victim whose requests share a warm one
    patient        long prompts sent at once, each asking again 4 s after it was refused
    patient-outputs  long answers asked for so
    flows          requests of all three classes, each for the next of many adapters
    classes        requests of all three classes
    choices        eight choices a request
    logprobs       the 20 likeliest tokens at every place
    deadlines      requests that end by their deadline of half a second
    cancels        requests that are left 5 to 20 ms after they were sent
    stop-strings   sixteen stop strings of the greatest length, none of which comes
    two-tenant     32 requests a second, whatever happens to them; `--streams 1 --period-s 1` is its victim, --slots 64

For each attack and policy: the victim alone, the attack's beginning, the victim beside it; `--rounds` times, the
policies by turns, because what a machine does in a second differs from one quarter of a minute to the next. An attack
that ends of itself before it is ended is an error. A request of the victim that has no token at the end counts with the
time that it has waited (`victim_unanswered` of them), so a long wait is never left out. What the victim had alone is
pooled over both policies: nobody queues then. `victim_cached_share` is the part of its prompt tokens that the prefix
cache had.

Prints JSON lines with --json: {"bench": "isolation", "attack", "policy", ...}. `victim_ttft_p95_ratio`,
`victim_tokens_per_s_ratio` are to the victim alone. `quantum_ms` is what a decode quantum took beside the attacker: for
so long a request may keep its slot. `victim_ttft_p95_less_quantum_ratio` is the first ratio with one quantum taken off.
`total_cost_per_s` is prompt + 2 * output tokens a second of both, of the attacker as the scheduler counted it,
and `total_ratio_to_fcfs` compares that.

    python bench/isolation.py [--engine torch|fake] [--attacks short,adapters] [--seconds 12] [--rounds 1] [--json]

Beside the demo model a GPU waits for the host; `--model FOLDER` serves one of a real shape (bench/shapes.py).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from manylora.client import Client, RequestFailed
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import WORKER_MODULE, ClusterOptions, LocalCluster
from manylora_shared.fairness.costs import QUANTUM_TOKENS

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds what stands beside it as well
from bench.isolation_traffic import (
    ATTACKS,
    BUCKET_S,
    CLASSES,
    LONGEST_TOKENS,
    Attack,
    Target,
    Victim,
    attack_process,
    victim,
)

POLICIES = {"fair": "fair", "fcfs": "arrival"}
"""By the name in the results: the scheduler's --order."""
VICTIM, ATTACKER = "victim", "attacker"
WEIGHT = 4
ADAPTER_BYTES = 1 << 20
"""Of device memory that an adapter of the fake engine takes at most; one of the demo model takes a third of it."""
ADAPTERS_ON_DEVICE = 8
ADAPTERS_ON_HOST = 16
WAIT_TIMEOUT_S = 60.0


@dataclass
class Attacked:
    """What the attacker got."""

    tokens: int = 0
    """Prompt tokens of the answers that began, and tokens that came."""
    cost: int = 0
    """Prompt + 2 * output tokens, as the scheduler counted them."""
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Of the whole attack."""


@dataclass
class Case:
    alone: Victim = field(default_factory=Victim)
    beside: Victim = field(default_factory=Victim)
    attacked: Attacked = field(default_factory=Attacked)

    def add(self, other: Case) -> None:
        self.alone.add(other.alone)
        self.beside.add(other.beside)
        self.attacked.tokens += other.attacked.tokens
        self.attacked.cost += other.attacked.cost
        self.attacked.outcomes += other.attacked.outcomes

    @property
    def total_tokens_per_s(self) -> float:
        return (self.beside.prompt_tokens + self.beside.tokens + self.attacked.tokens) / self.beside.seconds

    @property
    def total_cost_per_s(self) -> float:
        victims = self.beside.prompt_tokens + 2 * self.beside.tokens
        return (victims + self.attacked.cost) / self.beside.seconds


# ---- clusters and cases


@dataclass(frozen=True)
class Bench:
    """One policy's cluster, with tenants and adapters in place."""

    cluster: LocalCluster
    client: Client
    adapters: Sequence[str]
    arguments: argparse.Namespace

    def target(self, tenant: str, qos_class: str) -> Target:
        return Target(self.cluster.router, read_key(self.cluster.key_file), tenant, qos_class)

    async def victim(self, seconds: float, seed: int, prefix_tokens: int = 0) -> Victim:
        arguments = self.arguments
        target = self.target(VICTIM, "interactive")
        return await victim(target, arguments.streams, arguments.period_s, seconds, seed, prefix_tokens)

    async def case(self, attack: Attack, seed: int) -> Case:
        seconds = self.arguments.seconds
        if attack.victim_prefix_tokens:
            await self.victim(1.0, seed + 2, attack.victim_prefix_tokens)  # it is warm from here on
        alone = await self.victim(seconds, seed, attack.victim_prefix_tokens)
        here, there = multiprocessing.get_context("spawn").Pipe()
        target = self.target(ATTACKER, self.arguments.attacker_class)
        child = multiprocessing.get_context("spawn").Process(
            target=attack_process, args=(attack, target, self.adapters, there), daemon=True
        )
        child.start()
        there.close()
        try:
            if attack.is_backlogged:
                await self._wait_backlogged(child, "begun")
            await asyncio.sleep(seconds / 4)
            began, cost = time.perf_counter(), await self._attackers_cost()
            beside = await self.victim(seconds, seed + 1, attack.victim_prefix_tokens)
            ended, cost_after = time.perf_counter(), await self._attackers_cost()
            beside.seconds = ended - began
            if attack.is_backlogged:
                await self._wait_backlogged(child, "held on until the end")
            here.send("stop")
            buckets, outcomes = await asyncio.to_thread(here.recv)
        finally:
            child.kill()
            await asyncio.to_thread(child.join)
        await self._wait_empty()
        tokens = sum(count for bucket, count in buckets.items() if began <= bucket * BUCKET_S < ended)
        return Case(alone, beside, Attacked(tokens, cost_after - cost, collections.Counter(outcomes)))

    async def _attackers_cost(self) -> int:
        flows = (await self.client.status()).scheduler.flows
        return sum(flow.served_cost for flow in flows if flow.tenant_id == ATTACKER)

    async def _wait_backlogged(self, child: multiprocessing.process.BaseProcess, what: str) -> None:
        """Until the attacker waits for room; soon, as it asks for far more than there is."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while True:
                    if not child.is_alive():
                        raise RuntimeError(f"the attack has not {what}: its process is gone")
                    flows = (await self.client.status()).scheduler.flows
                    if any(flow.tenant_id == ATTACKER and flow.queued for flow in flows):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise RuntimeError(f"the attack has not {what}: nothing of it waits for room") from None

    async def _wait_empty(self) -> None:
        """Until nothing of any request is left."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while True:
                status = await self.client.status()
                if not status.scheduler.flows and not any(worker.running for worker in status.workers):
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def bench_cluster(order: str, arguments: argparse.Namespace) -> AsyncIterator[Bench]:
    slots = arguments.slots
    flags = [
        f"--sequence-slots={slots}",
        f"--max-batch-tokens={arguments.max_batch_tokens}",
        f"--prefill-chunk-tokens={arguments.max_batch_tokens // 2}",
        f"--target-step-ms={arguments.target_step_ms}",
        f"--interactive-step-ms={arguments.interactive_step_ms}",
        f"--num-blocks={arguments.num_blocks}",
        f"--device-adapter-mb={ADAPTERS_ON_DEVICE * arguments.adapter_bytes / (1 << 20)}",
        f"--host-adapter-mb={ADAPTERS_ON_HOST * arguments.adapter_bytes / (1 << 20)}",
    ]
    if arguments.engine == "fake":
        flags.append(f"--fake-step-ms={arguments.step_ms}")
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=arguments.model / "model" if arguments.model else BASE_FOLDER,
            model_name=arguments.model_name,
            data=Path(data),
            device=arguments.device,
            worker_flags=tuple(flags),
            scheduler_flags=(f"--order={order}", *(() if arguments.overload else ("--no-overload",))),
            scheduler_module="manylora_sim.scheduler",
            worker_module="manylora_sim.worker" if arguments.engine == "fake" else WORKER_MODULE,
        )
        async with (
            LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running,
            Client(running.router) as client,
        ):
            for tenant in (VICTIM, ATTACKER):
                policy = f"tenant_id: {tenant}\nclasses:\n"
                policy += "".join(f"  {qos_class}: {{weight: {WEIGHT}}}\n" for qos_class in CLASSES)
                if tenant == VICTIM and arguments.victim_reserve_mb:
                    policy += f"quotas: {{kv_hbm_mb_reserve: {arguments.victim_reserve_mb}}}\n"
                await client.tenants.apply(policy, timeout_s=10)
            names: list[str] = []
            if any(ATTACKS[name].cycles_adapters for name in arguments.attacks):
                names = await _add_adapters(client, arguments, Path(data))
            yield Bench(running, client, names, arguments)


async def _add_adapters(client: Client, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Copies of one adapter that differ in two bytes of its weights, under names of their own."""
    names = [f"copy-{index}" for index in range(arguments.adapters)]
    copy = folder / "copy"
    shutil.copytree(arguments.model / "adapter" if arguments.model else adapter_folder("words"), copy)
    weights = copy / "adapter_model.safetensors"
    end = weights.stat().st_size
    for index, name in enumerate(names):
        with weights.open("r+b") as file:
            # Little-endian: the low bits of the last float32's fraction, or the last bfloat16 but one, next to zero.
            file.seek(end - 4)
            file.write(index.to_bytes(2, "little"))
        await client.adapters.add(ATTACKER, name, copy)
    return names


# ---- results


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not pass; nan where there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def report(name: str, cases: dict[str, Case], arguments: argparse.Namespace) -> None:
    alone = Victim()
    for case in cases.values():
        alone.add(case.alone)
    common = {
        "engine": arguments.engine,
        "device": arguments.device,
        "model": arguments.model_name,
        "attacker_class": arguments.attacker_class,
        "rounds": arguments.rounds,
        "overload": arguments.overload,
        "slots": arguments.slots,
        "max_batch_tokens": arguments.max_batch_tokens,
        "target_step_ms": arguments.target_step_ms,
        "interactive_step_ms": arguments.interactive_step_ms,
        "num_blocks": arguments.num_blocks,
        "victim_reserve_mb": arguments.victim_reserve_mb,
    }
    alone_p95 = quantile(alone.ttft_ms, 0.95)
    emit(arguments.json, "isolation", attack="none", before=name, policy="both", **common, **_seen(alone))
    for policy, case in cases.items():
        beside = case.beside
        p95 = quantile(beside.ttft_ms, 0.95)
        quantum_ms = QUANTUM_TOKENS * quantile(beside.token_gap_ms, 0.5)
        others = {}
        if policy == "fair" and "fcfs" in cases:
            others = {
                "total_ratio_to_fcfs": case.total_cost_per_s / cases["fcfs"].total_cost_per_s,
                "fcfs_ttft_p95_over_this": quantile(cases["fcfs"].beside.ttft_ms, 0.95) / p95,
            }
        emit(
            arguments.json,
            "isolation",
            attack=name,
            policy=policy,
            **common,
            **_seen(beside),
            victim_ttft_p95_ratio=p95 / alone_p95,
            victim_ttft_p99_ratio=quantile(beside.ttft_ms, 0.99) / quantile(alone.ttft_ms, 0.99),
            quantum_ms=quantum_ms,
            victim_ttft_p95_less_quantum_ratio=(p95 - quantum_ms) / alone_p95,
            victim_tokens_per_s_ratio=beside.tokens_per_s / alone.tokens_per_s,
            victim_token_gap_ratio=quantile(beside.token_gap_ms, 0.5) / quantile(alone.token_gap_ms, 0.5),
            total_tokens_per_s=case.total_tokens_per_s,
            total_cost_per_s=case.total_cost_per_s,
            **others,
            attacker_outcomes=case.attacked.outcomes,
            load_1m=os.getloadavg()[0],
        )


def _seen(found: Victim) -> dict[str, object]:
    return {
        "victim_requests": len(found.ttft_ms),
        "victim_unanswered": found.unanswered,
        "victim_failed": dict(found.failed),
        "victim_ttft_p50_ms": quantile(found.ttft_ms, 0.5),
        "victim_ttft_p95_ms": quantile(found.ttft_ms, 0.95),
        "victim_ttft_p99_ms": quantile(found.ttft_ms, 0.99),
        "victim_queue_p95_ms": quantile(found.queue_ms, 0.95),
        "victim_token_gap_p50_ms": quantile(found.token_gap_ms, 0.5),
        "victim_tokens_per_s": found.tokens_per_s,
        "victim_cached_share": found.cached_tokens / max(1, found.finished_prompt_tokens),
    }


def emit(as_json: bool, bench: str, **values: object) -> None:
    """One line. What could not be measured (nan) is null."""
    rounded = {
        key: (None if math.isnan(value) else round(value, 3)) if isinstance(value, float) else value
        for key, value in values.items()
    }
    if as_json:
        print(json.dumps({"bench": bench, **rounded}), flush=True)
    else:
        print("  ".join(f"{key}={value}" for key, value in rounded.items()), flush=True)


async def main() -> None:
    arguments = parse()
    async with contextlib.AsyncExitStack() as stack:
        benches = {
            policy: await stack.enter_async_context(bench_cluster(POLICIES[policy], arguments))
            for policy in arguments.policies
        }
        for bench in benches.values():
            await bench.victim(2.0, 0)  # what is slow once
        for seed, name in enumerate(arguments.attacks):
            print(f"{name} ...", file=sys.stderr)
            cases = {policy: Case() for policy in benches}
            for round_ in range(arguments.rounds):
                for policy, bench in benches.items():
                    cases[policy].add(await bench.case(ATTACKS[name], 1000 * seed + 10 * round_ + 1))
            report(name, cases, arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--device", default="cpu", help="of the torch engine: cpu, cuda, cuda:1, ...")
    parser.add_argument("--model", type=Path, help="a folder that bench/shapes.py has made, in place of the demo model")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="comma-separated: %(default)s")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated: %(default)s")
    parser.add_argument(
        "--overload", action="store_true", help="with overload control; without, what the queue is worth by itself"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="that the victim is measured beside each attack")
    parser.add_argument("--rounds", type=int, default=1, help="how many times, the policies by turns")
    parser.add_argument("--attacker-class", choices=("interactive", "standard", "batch"), default="interactive")
    parser.add_argument("--slots", type=int, default=16, help="sequences that the worker runs at a time")
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=512,
        help="tokens of a step of the worker, of one prompt half as many: what a prompt adds to others' time per token",
    )
    parser.add_argument(
        "--target-step-ms",
        type=float,
        help="what a step should take; 0: any time; without it 8 for the torch engine on the CPU, else 25",
    )
    parser.add_argument(
        "--interactive-step-ms", type=float, help="the same with interactive requests; without it as above"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=0, help="KV blocks of 16 tokens; 0: the longest request fits in every slot"
    )
    parser.add_argument(
        "--victim-reserve-mb",
        type=int,
        default=0,
        help="of KV on the worker, by the victim's policy (2 MiB a fake block)",
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="a step of the fake engine")
    parser.add_argument("--adapters", type=int, default=96, help="that the attack of adapters cycles through")
    parser.add_argument("--streams", type=int, default=4, help="the victim's")
    parser.add_argument("--period-s", type=float, default=0.5, help="between two requests of a stream of the victim")
    arguments = parser.parse_args()
    for option, known in (("attacks", ATTACKS), ("policies", POLICIES)):
        names = getattr(arguments, option).split(",")
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"--{option}: {', '.join(unknown)} is none of {', '.join(known)}")
        setattr(arguments, option, names)
    if arguments.rounds < 1:
        parser.error("--rounds: must be 1 or more")
    if not 1 <= arguments.adapters <= 1 << 16:
        parser.error("--adapters: must be 1 to 65536")
    if arguments.target_step_ms is None:
        arguments.target_step_ms = 8.0 if (arguments.engine, arguments.device) == ("torch", "cpu") else 25.0
    if arguments.interactive_step_ms is None:
        arguments.interactive_step_ms = arguments.target_step_ms
    arguments.num_blocks = arguments.num_blocks or arguments.slots * LONGEST_TOKENS // 16 + 64
    if arguments.model and arguments.engine == "fake":
        parser.error("--model: the fake engine has none")
    if arguments.model and not (adapter := arguments.model / "adapter" / "adapter_model.safetensors").is_file():
        parser.error(f"--model: {adapter} is no file; bench/shapes.py makes one")
    if arguments.engine == "fake":
        arguments.model_name, arguments.adapter_bytes = "fake", ADAPTER_BYTES
    elif arguments.model:
        arguments.model_name, arguments.adapter_bytes = arguments.model.name, round(1.02 * adapter.stat().st_size)
    else:
        arguments.model_name, arguments.adapter_bytes = BASE_NAME, ADAPTER_BYTES // 3
    return arguments


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except RequestFailed as failure:
        sys.exit(f"isolation: {failure}")
