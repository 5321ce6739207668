"""The traffic of bench/isolation.py: the victim's streams, and an attacker in a process of its own."""

from __future__ import annotations

import asyncio
import collections
import itertools
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
CLASSES = ("interactive", "standard", "batch")
VICTIM_PROMPT_TOKENS = 32
VICTIM_OUTPUT_TOKENS = 16
LONGEST_TOKENS = 2048
"""Context of the demo model. The fake engine's is larger; the attack is the same."""
BUCKET_S = 0.1
"""The attacker's tokens are counted in stretches of this length."""


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
    refused_pause_s: float = 0.05
    """How long a stream waits before it asks again after anything but a whole answer."""
    top_logprobs: int = 0
    num_stop_strings: int = 0
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    """Each request after a drawn time up to it."""
    all_classes: bool = False
    is_backlogged: bool = True
    """Whether it keeps more requests waiting than there is room for, all the time."""
    requests_per_s: float = 0.0
    """0: each stream asks as soon as it may; else requests come by a Poisson process, whatever happens to them."""


ATTACKS = {
    "short": Attack(streams=256, prompt_tokens=8, max_tokens=16),
    "long-prompts": Attack(streams=64, prompt_tokens=LONGEST_TOKENS - 8, max_tokens=4),
    "long-outputs": Attack(streams=64, prompt_tokens=8, max_tokens=LONGEST_TOKENS - 16),
    "adapters": Attack(streams=64, prompt_tokens=16, max_tokens=16, cycles_adapters=True),
    "slow-readers": Attack(streams=128, prompt_tokens=8, max_tokens=1500, n=4, read_pause_s=1.0),
    "prefixes": Attack(streams=64, prompt_tokens=LONGEST_TOKENS // 2, max_tokens=4, victim_prefix_tokens=512),
    "patient": Attack(streams=160, prompt_tokens=LONGEST_TOKENS - 148, max_tokens=16, refused_pause_s=4.0),
    "patient-outputs": Attack(streams=160, prompt_tokens=20, max_tokens=LONGEST_TOKENS - 168, refused_pause_s=4.0),
    "flows": Attack(streams=200, prompt_tokens=64, max_tokens=64, cycles_adapters=True, all_classes=True),
    "classes": Attack(streams=192, prompt_tokens=64, max_tokens=64, all_classes=True),
    "choices": Attack(streams=64, prompt_tokens=8, max_tokens=64, n=8),
    "logprobs": Attack(streams=128, prompt_tokens=8, max_tokens=64, top_logprobs=20),
    "deadlines": Attack(streams=128, prompt_tokens=512, max_tokens=64, deadline_s=0.5, is_backlogged=False),
    "cancels": Attack(
        streams=128, prompt_tokens=LONGEST_TOKENS // 2, max_tokens=64, cancel_after_s=0.02, is_backlogged=False
    ),
    "stop-strings": Attack(streams=128, prompt_tokens=8, max_tokens=128, num_stop_strings=16, is_backlogged=False),
    "two-tenant": Attack(streams=0, prompt_tokens=256, max_tokens=128, requests_per_s=32.0, is_backlogged=False),
}


@dataclass(frozen=True)
class Target:
    """Whom requests are sent to, and in whose name."""

    address: str
    key: str
    tenant: str
    qos_class: str

    def metadata(self, adapter: str = "", qos_class: str = "") -> dict[str, str]:
        named = {"x-adapter-id": adapter} if adapter else {}
        return {"x-tenant-id": self.tenant, "x-request-class": qos_class or self.qos_class, **named, **bearer(self.key)}


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
    attacker = _Attacker(attack, target, adapters if attack.cycles_adapters else ("",))
    running = [asyncio.create_task(attacker.stream()) for _ in range(attack.streams)]
    if attack.requests_per_s:
        running.append(asyncio.create_task(attacker.arrivals()))
    stopped = asyncio.create_task(told.wait())
    await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            task.result()  # it ends by a bug alone
        task.cancel()
    await asyncio.wait(running)
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    await attacker.channel.close()
    return dict(attacker.tokens), dict(attacker.outcomes)


class _Attacker:
    def __init__(self, attack: Attack, target: Target, adapters: Sequence[str]) -> None:
        self.channel = GrpcTransport().connect(target.address)
        self.tokens: collections.Counter[int] = collections.Counter()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._attack = attack
        self._target = target
        self._rng = random.Random(5)
        self._adapters = itertools.cycle(adapters)
        self._classes = itertools.cycle(CLASSES if attack.all_classes else ("",))

    async def stream(self) -> None:
        while True:
            if await self._request() != "completed":
                await asyncio.sleep(self._attack.refused_pause_s)

    async def arrivals(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._request())
                await asyncio.sleep(self._rng.expovariate(self._attack.requests_per_s))

    async def _request(self) -> str:
        """Returns how it ended: completed, left, or the status's name."""
        try:
            async with asyncio.timeout(self._patience_s()):
                outcome = await self._read()
        except TimeoutError:
            outcome = "left"
        self.outcomes[outcome] += 1
        return outcome

    def _patience_s(self) -> float | None:
        longest_s = self._attack.cancel_after_s
        return longest_s and self._rng.uniform(longest_s / 4, longest_s)

    async def _read(self) -> str:
        attack, seed = self._attack, self._rng.getrandbits(30)
        message = _request(_tokens(seed, attack.prompt_tokens), seed, attack.max_tokens, attack.n)
        message.stop.extend(f"{index:02}" + "never said " * 5 for index in range(attack.num_stop_strings))
        if attack.top_logprobs:
            message.sampling.top_logprobs = attack.top_logprobs
        metadata = self._target.metadata(next(self._adapters), next(self._classes))
        stream = self.channel.stream(GENERATE, message, metadata=metadata, timeout=attack.deadline_s)
        prompt_tokens = attack.prompt_tokens
        try:
            while (response := await stream.read()) is not None:
                if response.HasField("delta") and response.delta.token_ids:
                    now = int(time.perf_counter() / BUCKET_S)
                    self.tokens[now] += len(response.delta.token_ids) + prompt_tokens
                    prompt_tokens = 0
                    if attack.read_pause_s:
                        await asyncio.sleep(attack.read_pause_s)
        except RpcError as error:
            return error.code.name
        finally:
            stream.cancel()
        return "completed"


def _tokens(seed: int | str, count: int) -> list[int]:
    """The same for the same seed. Two seeds share no beginning that a cache could find."""
    return [3 + byte % 250 for byte in random.Random(seed).randbytes(count)]


def _request(prompt: Sequence[int], seed: int, max_tokens: int, n: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True, n=n)
    message.token_ids.ids.extend(prompt)
    message.sampling.seed = seed
    message.sampling.temperature = 1.0 if n > 1 else 0.0
    return message
