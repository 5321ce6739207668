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

For each attack and policy: the victim alone, the attack's beginning, the victim beside it. A request of the victim that
has no token at the end counts with the time that it has waited (`victim_unanswered` of them), so a long wait is never
left out. What the victim had alone is pooled over both policies: nobody queues then. `victim_cached_share` is the part
of its prompt tokens that the prefix cache had.

Prints JSON lines with --json: {"bench": "isolation", "attack", "policy", ...}. `victim_ttft_p95_ratio`,
`victim_tokens_per_s_ratio` are to the victim alone. `quantum_ms` is what a decode quantum took beside the attacker: for
so long a request may keep its slot. `victim_ttft_p95_less_quantum_ratio` is the first ratio with one quantum taken off.
`total_cost_per_s` is prompt + 2 * output tokens a second of both, of the attacker as the scheduler counted it,
and `total_ratio_to_fcfs` compares that.

    python bench/isolation.py [--engine torch|fake] [--attacks short,adapters] [--seconds 12] [--json]
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
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from manylora.client import Client, RequestFailed
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local_cluster import ClusterOptions, LocalCluster
from manylora.v1 import inference_pb2
from manylora_shared.errors import RpcError
from manylora_shared.identity import bearer
from manylora_shared.transport.base import Channel, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_worker.engine.step_planner import QUANTUM_TOKENS

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
POLICIES = {"fair": "fair", "fcfs": "arrival"}
"""By the name in the results: the scheduler's --order."""
VICTIM, ATTACKER = "victim", "attacker"
WEIGHT = 4
VICTIM_PROMPT_TOKENS = 32
VICTIM_OUTPUT_TOKENS = 16
LONGEST_TOKENS = 2048
"""Context of the demo model. The fake engine's is larger; the attack is the same."""
ADAPTER_BYTES = 1 << 20
"""Of device memory that an adapter takes at most: the fake engine's take a MiB, the demo model's a third of one."""
ADAPTERS_ON_DEVICE = 8
ADAPTERS_ON_HOST = 16
BUCKET_S = 0.1
"""The attacker's tokens are counted in stretches of this length."""
REFUSED_PAUSE_S = 0.05
DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Attack:
    streams: int
    prompt_tokens: int
    max_tokens: int
    n: int = 1
    cycles_adapters: bool = False
    read_pause_s: float = 0.0
    """Between two reads of one stream."""
    victim_prefix_tokens: int = 0
    """With which all of the victim's prompts begin, beside this attack and alone before it."""


ATTACKS = {
    "short": Attack(streams=256, prompt_tokens=8, max_tokens=16),
    "long-prompts": Attack(streams=64, prompt_tokens=LONGEST_TOKENS - 8, max_tokens=4),
    "long-outputs": Attack(streams=64, prompt_tokens=8, max_tokens=LONGEST_TOKENS - 16),
    "adapters": Attack(streams=64, prompt_tokens=16, max_tokens=16, cycles_adapters=True),
    "slow-readers": Attack(streams=32, prompt_tokens=8, max_tokens=1500, n=4, read_pause_s=1.0),
    "prefixes": Attack(streams=64, prompt_tokens=LONGEST_TOKENS // 2, max_tokens=4, victim_prefix_tokens=512),
}


@dataclass(frozen=True)
class Target:
    """Whom requests are sent to, and in whose name."""

    address: str
    key: str
    tenant: str
    qos_class: str

    def metadata(self, adapter: str = "") -> dict[str, str]:
        named = {"x-adapter-id": adapter} if adapter else {}
        return {"x-tenant-id": self.tenant, "x-request-class": self.qos_class, **named, **bearer(self.key)}


@dataclass
class Victim:
    """What the victim's streams saw in some seconds."""

    ttft_ms: list[float] = field(default_factory=list)
    token_gap_ms: list[float] = field(default_factory=list)
    """Of each finished request: the mean time between two tokens."""
    queue_ms: list[float] = field(default_factory=list)
    """Of each finished request: how much of its time to the first token it waited for its grant."""
    prompt_tokens: int = 0
    finished_prompt_tokens: int = 0
    """Of finished requests, and of these what was cached."""
    cached_tokens: int = 0
    tokens: int = 0
    unanswered: int = 0
    failed: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def add(self, other: Victim) -> None:
        self.ttft_ms += other.ttft_ms
        self.token_gap_ms += other.token_gap_ms
        self.queue_ms += other.queue_ms
        self.prompt_tokens += other.prompt_tokens
        self.finished_prompt_tokens += other.finished_prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.tokens += other.tokens
        self.unanswered += other.unanswered
        self.failed += other.failed
        self.seconds += other.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Attacked:
    """What the attacker got."""

    tokens: int
    """Prompt tokens of the answers that began, and tokens that came."""
    cost: int
    """Prompt + 2 * output tokens, as the scheduler counted them."""
    outcomes: dict[str, int]
    """Of the whole attack."""


@dataclass(frozen=True)
class Case:
    alone: Victim
    beside: Victim
    attacked: Attacked

    @property
    def total_tokens_per_s(self) -> float:
        return (self.beside.prompt_tokens + self.beside.tokens + self.attacked.tokens) / self.beside.seconds

    @property
    def total_cost_per_s(self) -> float:
        victims = self.beside.prompt_tokens + 2 * self.beside.tokens
        return (victims + self.attacked.cost) / self.beside.seconds


# ---- the victim


async def victim(
    target: Target, streams: int, period_s: float, seconds: float, seed: int, prefix_tokens: int
) -> Victim:
    """The victim's closed loops for some seconds. What is unfinished then is cancelled. They ask at the same times
    whenever answers come within the period, and for what nobody asked before."""
    found = Victim(seconds=seconds)
    channel = GrpcTransport().connect(target.address)
    ends_at = time.perf_counter() + seconds

    async def loop(index: int) -> None:
        times, prompts = random.Random(index), random.Random(100 * seed + index)
        await asyncio.sleep(period_s * index / streams)
        while (began := time.perf_counter()) < ends_at:
            prompt = [*_tokens(VICTIM, prefix_tokens), *_tokens(prompts.getrandbits(30), VICTIM_PROMPT_TOKENS)]
            await _victim_request(channel, target, _request(prompt, 0, VICTIM_OUTPUT_TOKENS, 1), ends_at, found)
            await asyncio.sleep(max(0.0, began + period_s * times.uniform(0.8, 1.2) - time.perf_counter()))

    async with asyncio.TaskGroup() as tasks:
        for index in range(streams):
            tasks.create_task(loop(index))
    await channel.close()
    return found


async def _victim_request(
    channel: Channel, target: Target, message: inference_pb2.GenerateRequest, ends_at: float, found: Victim
) -> None:
    sent = time.perf_counter()
    stream = channel.stream(GENERATE, message, metadata=target.metadata())
    first_at: float | None = None
    tokens = 0
    try:
        async with asyncio.timeout(max(0.0, ends_at - sent)):
            while (response := await stream.read()) is not None:
                if response.WhichOneof("event") == "delta" and response.delta.token_ids:
                    now = time.perf_counter()
                    if first_at is None:
                        first_at = now
                        found.ttft_ms.append((now - sent) * 1e3)
                        found.prompt_tokens += len(message.token_ids.ids)
                        tokens_at_first = len(response.delta.token_ids)
                    tokens += len(response.delta.token_ids)
                    found.tokens += len(response.delta.token_ids)
                elif response.WhichOneof("event") == "finished":
                    found.queue_ms.append(response.finished.timings.queue_ms)
                    found.finished_prompt_tokens += response.finished.usage.prompt_tokens
                    found.cached_tokens += response.finished.usage.cached_prompt_tokens
        if first_at is not None and tokens > tokens_at_first:
            found.token_gap_ms.append((now - first_at) * 1e3 / (tokens - tokens_at_first))
    except TimeoutError:
        if first_at is None:
            found.ttft_ms.append((time.perf_counter() - sent) * 1e3)
            found.unanswered += 1
    except RpcError as error:
        found.failed[error.code.name] += 1
    finally:
        stream.cancel()


# ---- the attacker, in its own process


def attack_process(attack: Attack, target: Target, adapters: Sequence[str], pipe: Connection) -> None:
    """Attacks until something comes through the pipe; then sends back {stretch of time: tokens} and the outcomes."""
    os.nice(5)
    pipe.send(asyncio.run(_attack(attack, target, adapters, pipe)))


async def _attack(
    attack: Attack, target: Target, adapters: Sequence[str], pipe: Connection
) -> tuple[dict[int, int], dict[str, int]]:
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    channel = GrpcTransport().connect(target.address)
    tokens: collections.Counter[int] = collections.Counter()
    outcomes: collections.Counter[str] = collections.Counter()
    rng = random.Random(5)
    names = _cycle(adapters) if attack.cycles_adapters else _cycle(("",))

    async def loop() -> None:
        while True:
            outcome = await _attack_request(channel, attack, target, next(names), rng.getrandbits(30), tokens)
            outcomes[outcome] += 1
            if outcome != "completed":
                await asyncio.sleep(REFUSED_PAUSE_S)

    running = [asyncio.create_task(loop()) for _ in range(attack.streams)]
    stopped = asyncio.create_task(told.wait())
    await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            task.result()  # a loop ends by a bug alone
        task.cancel()
    await asyncio.wait(running)
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    await channel.close()
    return dict(tokens), dict(outcomes)


async def _attack_request(
    channel: Channel, attack: Attack, target: Target, adapter: str, seed: int, tokens: collections.Counter[int]
) -> str:
    """Returns how it ended: completed, or the status's name."""
    message = _request(_tokens(seed, attack.prompt_tokens), seed, attack.max_tokens, attack.n)
    stream = channel.stream(GENERATE, message, metadata=target.metadata(adapter))
    prompt_tokens = attack.prompt_tokens
    try:
        while (response := await stream.read()) is not None:
            if response.WhichOneof("event") == "delta" and response.delta.token_ids:
                tokens[int(time.perf_counter() / BUCKET_S)] += len(response.delta.token_ids) + prompt_tokens
                prompt_tokens = 0
                if attack.read_pause_s:
                    await asyncio.sleep(attack.read_pause_s)
    except RpcError as error:
        return error.code.name
    finally:
        stream.cancel()
    return "completed"


def _cycle(names: Sequence[str]) -> collections.abc.Iterator[str]:
    while True:
        yield from names


def _tokens(seed: int | str, count: int) -> list[int]:
    """The same for the same seed. Two seeds share no beginning that a cache could find."""
    return [3 + byte % 250 for byte in random.Random(seed).randbytes(count)]


def _request(prompt: Sequence[int], seed: int, max_tokens: int, n: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True, n=n)
    message.token_ids.ids.extend(prompt)
    message.sampling.seed = seed
    message.sampling.temperature = 1.0 if n > 1 else 0.0
    return message


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
            await self._wait_backlogged(child)
            await asyncio.sleep(seconds / 4)
            began, cost = time.perf_counter(), await self._attackers_cost()
            beside = await self.victim(seconds, seed + 1, attack.victim_prefix_tokens)
            ended, cost_after = time.perf_counter(), await self._attackers_cost()
            beside.seconds = ended - began
            here.send("stop")
            buckets, outcomes = await asyncio.to_thread(here.recv)
        finally:
            child.kill()
            await asyncio.to_thread(child.join)
        await self._wait_empty()
        tokens = sum(count for bucket, count in buckets.items() if began <= bucket * BUCKET_S < ended)
        return Case(alone, beside, Attacked(tokens, cost_after - cost, outcomes))

    async def _attackers_cost(self) -> int:
        flows = (await self.client.status()).scheduler.flows
        return sum(flow.served_cost for flow in flows if flow.tenant_id == ATTACKER)

    async def _wait_backlogged(self, child: multiprocessing.process.BaseProcess) -> None:
        """Until the attacker waits for room."""
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while True:
                if not child.is_alive():
                    raise RuntimeError("the attacker ended before its attack began")
                flows = (await self.client.status()).scheduler.flows
                if any(flow.tenant_id == ATTACKER and flow.queued for flow in flows):
                    return
                await asyncio.sleep(0.05)

    async def _wait_empty(self) -> None:
        """Until nothing of any request is left."""
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
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
        f"--num-blocks={arguments.num_blocks}",
        f"--device-adapter-mb={ADAPTERS_ON_DEVICE * arguments.adapter_bytes / (1 << 20)}",
        f"--host-adapter-mb={ADAPTERS_ON_HOST * arguments.adapter_bytes / (1 << 20)}",
    ]
    if arguments.engine == "fake":
        flags += ["--engine=fake", f"--fake-step-ms={arguments.step_ms}"]
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=BASE_FOLDER,
            model_name=BASE_NAME if arguments.engine == "torch" else "fake",
            data=Path(data),
            device=arguments.device,
            worker_flags=tuple(flags),
            scheduler_flags=(f"--order={order}", "--no-overload"),  # what the queue is worth by itself
        )
        async with (
            LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running,
            Client(running.router) as client,
        ):
            for tenant, qos_class in ((VICTIM, "interactive"), (ATTACKER, arguments.attacker_class)):
                policy = f"tenant_id: {tenant}\nclasses:\n  {qos_class}: {{weight: {WEIGHT}}}\n"
                if tenant == VICTIM and arguments.victim_reserve_mb:
                    policy += f"quotas: {{kv_hbm_mb_reserve: {arguments.victim_reserve_mb}}}\n"
                await client.tenants.apply(policy, timeout_s=10)
            names: list[str] = []
            if any(ATTACKS[name].cycles_adapters for name in arguments.attacks):
                names = await _add_adapters(client, arguments.adapters, Path(data))
            yield Bench(running, client, names, arguments)


async def _add_adapters(client: Client, count: int, folder: Path) -> list[str]:
    """Copies of one adapter that differ in the lowest bits of one weight, under names of their own."""
    names = [f"copy-{index}" for index in range(count)]
    copy = folder / "copy"
    shutil.copytree(adapter_folder("words"), copy)
    weights = copy / "adapter_model.safetensors"
    original = weights.read_bytes()
    for index, name in enumerate(names):
        # The last weight is a little-endian float32: its first two bytes are the low bits of its fraction.
        weights.write_bytes(original[:-4] + index.to_bytes(2, "little") + original[-2:])
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
        "attacker_class": arguments.attacker_class,
        "slots": arguments.slots,
        "max_batch_tokens": arguments.max_batch_tokens,
        "num_blocks": arguments.num_blocks,
        "victim_reserve_mb": arguments.victim_reserve_mb,
    }
    alone_p95 = quantile(alone.ttft_ms, 0.95)
    emit(arguments.json, attack="none", before=name, policy="both", **common, **_seen(alone))
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
            attack=name,
            policy=policy,
            **common,
            **_seen(beside),
            victim_ttft_p95_ratio=p95 / alone_p95,
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
        "victim_queue_p95_ms": quantile(found.queue_ms, 0.95),
        "victim_token_gap_p50_ms": quantile(found.token_gap_ms, 0.5),
        "victim_tokens_per_s": found.tokens_per_s,
        "victim_cached_share": found.cached_tokens / max(1, found.finished_prompt_tokens),
    }


def emit(as_json: bool, **values: object) -> None:
    """One line. What could not be measured (nan) is null."""
    rounded = {
        key: (None if math.isnan(value) else round(value, 3)) if isinstance(value, float) else value
        for key, value in values.items()
    }
    if as_json:
        print(json.dumps({"bench": "isolation", **rounded}), flush=True)
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
            cases = {policy: await bench.case(ATTACKS[name], 10 * seed + 1) for policy, bench in benches.items()}
            report(name, cases, arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--device", default="cpu", help="of the torch engine: cpu, cuda, cuda:1, ...")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="comma-separated: %(default)s")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated: %(default)s")
    parser.add_argument("--seconds", type=float, default=12.0, help="that the victim is measured beside each attack")
    parser.add_argument("--attacker-class", choices=("interactive", "standard", "batch"), default="interactive")
    parser.add_argument("--slots", type=int, default=16, help="sequences that the worker runs at a time")
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=512,
        help="tokens of a step of the worker, of one prompt half as many: what a prompt adds to others' time per token",
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
    if not 1 <= arguments.adapters <= 1 << 16:
        parser.error("--adapters: must be 1 to 65536")
    arguments.num_blocks = arguments.num_blocks or arguments.slots * LONGEST_TOKENS // 16 + 64
    arguments.adapter_bytes = ADAPTER_BYTES if arguments.engine == "fake" else ADAPTER_BYTES // 3
    return arguments


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except RequestFailed as failure:
        sys.exit(f"isolation: {failure}")
