"""The traffic of bench/isolation.py: the victim's streams, and an attacker in a process of its own."""

from __future__ import annotations

import asyncio
import collections
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from manylora.v1 import inference_pb2
from manylora_shared.errors import RpcError
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Channel, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
VICTIM_PROMPT_TOKENS = 32
VICTIM_OUTPUT_TOKENS = 16
LONGEST_TOKENS = 2048
"""Context of the demo model. The fake engine's is larger; the attack is the same."""
BUCKET_S = 0.1
"""The attacker's tokens are counted in stretches of this length."""
REFUSED_PAUSE_S = 0.05


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
    "slow-readers": Attack(streams=128, prompt_tokens=8, max_tokens=1500, n=4, read_pause_s=1.0),
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
            prompt = [*_tokens("victim", prefix_tokens), *_tokens(prompts.getrandbits(30), VICTIM_PROMPT_TOKENS)]
            await _victim_request(channel, target, _request(prompt, 0, VICTIM_OUTPUT_TOKENS, 1), ends_at, found)
            next_at = min(began + period_s * times.uniform(0.8, 1.2), ends_at)
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))

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
                if response.HasField("delta") and response.delta.token_ids:
                    now = time.perf_counter()
                    if first_at is None:
                        first_at = now
                        found.ttft_ms.append((now - sent) * 1e3)
                        found.prompt_tokens += len(message.token_ids.ids)
                        tokens_at_first = len(response.delta.token_ids)
                    tokens += len(response.delta.token_ids)
                    found.tokens += len(response.delta.token_ids)
                if response.HasField("finished"):
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
            if response.HasField("delta") and response.delta.token_ids:
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
