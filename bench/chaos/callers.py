"""Callers beside a fault, and what they saw: tenant `busy` with long answers, tenant `calm` with short ones.

Of the busy ones some use the Python client with both routers, which goes on at the other one; the others are plain gRPC
callers of one router each.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manylora.client import Client, Delta, RequestFailed, Sampling
from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.errors import RpcError
from manylora_shared.metadata import ADAPTER_KEY, TENANT_KEY
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Channel, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

from bench.chaos.cluster import ADAPTER, ChaosCluster

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]

PROMPTS = 6
LONG_TOKENS = 160
SHORT_TOKENS = 4
PATIENT, PLAIN = 4, 2  # busy streams through the client, and plain ones at each router
CALM_EACH_S = 0.1
AGAIN_S = 1.0  # after a failure: no storm
END_S = 60.0  # what has not ended so long after its fault has hung


@dataclass
class Seen:
    """Of one request."""

    caller: str  # patient, plain or calm
    prompt: int
    began_s: float
    first_s: float | None = None
    ended_s: float | None = None
    longest_gap_s: float = 0.0
    code: str = ""  # empty: completed
    tokens: tuple[int, ...] = ()
    resumed: bool = False
    last_s: float = 0.0  # of its newest frame

    def got(self, token_ids: Iterable[int]) -> None:
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        self.tokens += tuple(token_ids)


@dataclass(frozen=True)
class Summary:
    requests: Mapping[str, int]
    errors: Mapping[str, Mapping[str, int]]  # by caller and code
    changed: int
    hung: int
    resumed: int
    pause_p95_s: float | None  # of the longest gap of each answer that ran when it began
    calm_ttft_p95_ms: float | None
    availability: float  # of the calm tenant


@dataclass
class Callers:
    cluster: ChaosCluster
    baseline: Mapping[int, tuple[int, ...]]
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_asking = True
        self._tasks: list[asyncio.Task[Any]] = []
        self._clients: list[Client] = []
        self._channels: list[Channel] = []

    def start(self) -> None:
        routers = self.cluster.routers
        for order in (routers, routers[::-1]):  # each begins with another one
            both = self._client("busy", order)
            for number in range(PATIENT // 2):
                self._tasks.append(asyncio.create_task(self._stream_on(both, "patient", number)))
        for address in routers:
            channel = GrpcTransport().connect(address)
            self._channels.append(channel)
            for number in range(PLAIN):
                self._tasks.append(asyncio.create_task(self._stream_on(channel, "plain", number)))
        self._tasks.append(asyncio.create_task(self._ask_calmly(self._client("calm"))))

    def _client(self, tenant: str, routers: Sequence[str] = ()) -> Client:
        client = self.cluster.client(tenant=tenant, routers=routers)
        self._clients.append(client)
        return client

    async def end(self) -> None:
        """What runs ends, or has hung."""
        self._is_asking = False
        _, hung = await asyncio.wait(self._tasks, timeout=END_S)
        for task in hung:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        for client in self._clients:
            await client.close()
        for channel in self._channels:
            await channel.close()

    async def _stream_on(self, client: Client | Channel, caller: str, number: int) -> None:
        while self._is_asking:
            seen = await self._ask(client, caller, number % PROMPTS, LONG_TOKENS)
            if seen.code:
                await asyncio.sleep(AGAIN_S)
            number += 1

    async def _ask_calmly(self, client: Client) -> None:
        asked: set[asyncio.Task[Seen]] = set()
        number = 0
        while self._is_asking:
            asked.add(asyncio.create_task(self._ask(client, "calm", number % PROMPTS, SHORT_TOKENS)))
            asked = {task for task in asked if not task.done() or task.result().code}
            number += 1
            await asyncio.sleep(CALM_EACH_S)
        await asyncio.gather(*asked)

    async def _ask(self, client: Client | Channel, caller: str, prompt: int, max_tokens: int) -> Seen:
        seen = Seen(caller, prompt, time.monotonic())
        self.seen.append(seen)
        try:
            if isinstance(client, Client):
                await self._read(client, seen, max_tokens)
            else:
                await self._read_plainly(client, seen, max_tokens)
        except RequestFailed as error:
            seen.code = error.code
        except RpcError as error:
            seen.code = error.code.name
        seen.ended_s = time.monotonic()
        return seen

    async def _read(self, client: Client, seen: Seen, max_tokens: int) -> None:
        stream = client.generate(**request(self.cluster, seen.prompt, max_tokens), timeout_s=END_S)
        async for event in stream:
            if isinstance(event, Delta):
                seen.got(event.token_ids)
        seen.resumed = bool(stream.result().usage.resumed)
        seen.code = "" if stream.result().outcome == "completed" else str(stream.result().outcome)

    async def _read_plainly(self, channel: Channel, seen: Seen, max_tokens: int) -> None:
        asked = request(self.cluster, seen.prompt, max_tokens)
        message = inference_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True)
        message.sampling.temperature, message.sampling.seed = 0.0, seen.prompt
        if isinstance(asked["prompt"], str):
            message.text = asked["prompt"]
        else:
            message.token_ids.ids.extend(asked["prompt"])
        metadata = {**bearer(self.cluster.key), TENANT_KEY: "busy"}
        if asked["adapter"]:
            metadata[ADAPTER_KEY] = asked["adapter"]
        stream = channel.stream(GENERATE, message, timeout=END_S, metadata=metadata)
        while (frame := await stream.read()) is not None:
            if frame.HasField("delta"):
                seen.got(frame.delta.token_ids)
            if frame.HasField("finished"):
                seen.resumed = bool(frame.finished.usage.resumed)
                is_done = frame.finished.outcome == common_pb2.OUTCOME_COMPLETED
                seen.code = "" if is_done else common_pb2.Outcome.Name(frame.finished.outcome)

    def summary(self, since_s: float, until_s: float) -> Summary:
        """Of what ran, or came, between these times."""
        told = [s for s in self.seen if s.began_s < until_s and (s.ended_s is None or s.ended_s > since_s)]
        busy = [s for s in told if s.caller != "calm"]
        calm = [s for s in told if s.caller == "calm"]
        by_caller = {caller: [s for s in told if s.caller == caller] for caller in ("patient", "plain", "calm")}
        ttfts = [1e3 * (s.first_s - s.began_s) for s in calm if s.first_s is not None]
        struck = [s for s in busy if s.began_s < since_s]
        gaps = [s.longest_gap_s for s in struck if s.ended_s is not None and not s.code]
        completed = sum(s.ended_s is not None and not s.code for s in calm)
        return Summary(
            requests={caller: len(each) for caller, each in by_caller.items()},
            errors={caller: dict(Counter(s.code for s in each if s.code)) for caller, each in by_caller.items()},
            changed=sum(s.tokens != self.baseline[s.prompt][: len(s.tokens)] for s in told),
            hung=sum(s.ended_s is None for s in told),
            resumed=sum(s.resumed for s in told),
            pause_p95_s=p95(gaps),
            calm_ttft_p95_ms=p95(ttfts),
            availability=completed / max(1, len(calm)),
        )


def request(cluster: ChaosCluster, prompt: int, max_tokens: int) -> dict[str, Any]:
    """The prompt of this number: every second one is answered by an adapter."""
    adapter = ADAPTER if prompt % 2 and not cluster.setting.is_fake else ""
    given = [5, 6, 7 + prompt] if cluster.setting.is_fake else f"do:chaos{prompt}=" * 8
    return {
        "prompt": given,
        "adapter": adapter,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "sampling": Sampling(temperature=0.0, seed=prompt),
    }


async def baseline(cluster: ChaosCluster) -> dict[int, tuple[int, ...]]:
    """Answers while nothing happens."""
    async with cluster.client(tenant="busy") as client:
        found = {}
        for prompt in range(PROMPTS):
            result = await client.complete(**request(cluster, prompt, LONG_TOKENS), timeout_s=END_S)
            found[prompt] = result.token_ids
        return found


def p95(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=20, method="inclusive")[-1]
