"""What the cluster's callers do, and what they see: seeded calls of every kind, each kept whole for validation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.errors import RpcError
from manylora_shared.ids import adapter_uid
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Stream, methods_of
from manylora_sim.fake_runner import reference_tokens

from tests.sim.cluster import (
    BROKEN_ADAPTER,
    EOS,
    EOS_ONE_IN,
    LEAVING_ADAPTER,
    TENANTS,
    VOCAB_SIZE,
    Cluster,
    adapters_of,
    digest_of_adapter,
)

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
CLIENT = "client"
FIRST_BYTE_ID = 3
"""FakeText's: a token is a byte."""
SHARED_PREFIX = range(3, 19)
"""All longer prompts begin with it, whoever's they are."""
LONG_TOKENS = 100
MAX_OVERLOAD_RETRIES = 4
"""Of a call that must succeed: what the cluster gave up before must be over by then."""


@dataclass(eq=False)
class Call:
    """One Generate call: what is asked, how its caller behaves, and what came of it."""

    number: int
    tenant: str
    qos_class: str
    adapter: str
    prompt: Sequence[int]
    max_tokens: int
    n: int
    seed: int
    is_greedy: bool
    stop: str = ""
    ignores_eos: bool = False
    timeout_s: float | None = None
    cancel_after_frames: int | None = None
    """The caller goes away after so many frames."""
    read_pause_s: float = 0.0
    """Between two reads."""
    longest_pause_s: float = 0.0
    """That it made so far."""
    router: str = ""
    began_at: float = 0.0
    ended_at: float | None = None
    frames: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    frame_times: list[float] = field(default_factory=list)
    """When each frame was read."""
    error: RpcError | None = None
    is_cancelled: bool = False
    is_after_heal: bool = False
    overload_retries: int = 0
    _tokens: dict[int, list[int]] = field(init=False, default_factory=dict)
    """By choice, of the first `_num_read` frames."""
    _num_read: int = field(init=False, default=0)
    _references: dict[tuple[int, int], list[int]] = field(init=False, default_factory=dict)
    """By choice and tokens in force."""

    @property
    def is_overloaded(self) -> bool:
        """Refused, or taken out of the queue, because the cluster gives up requests like it for now."""
        return self.error is not None and self.error.label == "overloaded" and not self.frames

    @property
    def finished(self) -> inference_pb2.Finished | None:
        return next((f.finished for f in reversed(self.frames) if f.HasField("finished")), None)

    @property
    def max_tokens_in_force(self) -> int:
        """Overload may have lowered what was asked for, and then says so in the first frame."""
        started = self.frames[0].started if self.frames else inference_pb2.Started()
        return started.degraded.max_tokens if started.HasField("degraded") else self.max_tokens

    def tokens_of(self, choice: int) -> list[int]:
        for frame in self.frames[self._num_read :]:
            if frame.HasField("delta"):
                self._tokens.setdefault(frame.delta.choice, []).extend(frame.delta.token_ids)
        self._num_read = len(self.frames)
        return self._tokens.get(choice, [])

    def reference(self, choice: int) -> list[int]:
        """What a right cluster answers, were there no stop string."""
        asked = (choice, self.max_tokens_in_force)
        if asked not in self._references:
            self._references[asked] = reference_tokens(
                self.prompt,
                adapter_uid(digest_of_adapter(self.tenant, self.adapter), None) if self.adapter else None,
                self.seed,
                choice,
                self.max_tokens_in_force,
                greedy=self.is_greedy,
                vocab_size=VOCAB_SIZE,
                eos_token_id=EOS,
                eos_one_in=EOS_ONE_IN,
                stop_token_ids=[EOS],
            )
        return self._references[asked]

    def text_of(self, choice: int) -> str:
        deltas = (f.delta for f in self.frames if f.HasField("delta"))
        return "".join(delta.text for delta in deltas if delta.choice == choice)

    def reference_text(self, choice: int) -> str:
        """As `reference`; tokens before the first byte's have no text."""
        spoken = (token - FIRST_BYTE_ID for token in self.reference(choice))
        return bytes(byte for byte in spoken if byte >= 0).decode(errors="replace")

    def describe(self) -> str:
        outcome = common_pb2.Outcome.Name(self.finished.outcome) if self.finished is not None else "no terminal frame"
        return (
            f"call {self.number} of {self.tenant}/{self.adapter or 'base'} to {self.router} at {self.began_at:.3f} s: "
            f"{len(self.frames)} frames, {outcome}, error {self.error}, ended {self.ended_at}"
        )


class Traffic:
    """Draws calls and runs them as tasks of the callers' own node."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.calls: list[Call] = []
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/traffic")
        self._node = cluster.loop.node(CLIENT)
        self._transport = cluster.network.transport(CLIENT)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, duration_s: float, calls: int) -> None:
        """Bursts of calls, over about `duration_s`."""
        left = calls
        while left:
            burst = min(left, self._rng.choice([1, 1, 2, 4, 12]))
            for _ in range(burst):
                self.begin(self.draw())
            left -= burst
            await asyncio.sleep(self._rng.expovariate(calls / duration_s / 3.0))

    def begin(self, call: Call) -> None:
        self.calls.append(call)
        call.router = call.router or self._rng.choice(self._cluster.names("router"))
        call.began_at = self._cluster.loop.time()
        self._tasks.append(self._node.start(self._run(call)))

    async def all_ended(self, timeout_s: float) -> None:
        if self._tasks:
            _, waiting = await asyncio.wait(self._tasks, timeout=timeout_s)
            left = [call.describe() for call in self.calls if call.ended_at is None]
            assert not waiting, f"{len(waiting)} calls have not ended {timeout_s} s after everything healed: {left}"
        for task in self._tasks:
            task.result()

    def draw(self) -> Call:
        rng = self._rng
        call = self.plain(rng.choice(list(TENANTS)))
        kind = rng.random()
        if kind < 0.15:
            call.cancel_after_frames = rng.randint(0, 6)
        elif kind < 0.30:
            call.timeout_s = rng.choice([0.05, 0.3, 1.0, 5.0])
        elif kind < 0.40:
            call.read_pause_s = rng.choice([0.02, 0.2])
        elif kind < 0.45:
            call.stop = self._stop_of(call)
        elif kind < 0.48:
            call.adapter = rng.choice([BROKEN_ADAPTER, LEAVING_ADAPTER, "unknown"])
        elif kind < 0.50:
            call.tenant = "stranger"
        return call

    def _stop_of(self, call: Call) -> str:
        """One to three characters that stand in the answer, or one that may."""
        text = call.reference_text(0)
        at = self._rng.randrange(max(1, len(text)))
        return text[at : at + self._rng.randint(1, 3)] or chr(self._rng.randint(97, 122))

    def plain(self, tenant: str) -> Call:
        """A call without any misbehaviour."""
        rng = self._rng
        n = rng.choice([1, 1, 1, 1, 2, 3])
        call = Call(
            number=len(self.calls),
            tenant=tenant,
            qos_class=rng.choice(["", "interactive", "standard", "batch"]),
            adapter=rng.choice(["", *adapters_of(tenant), *adapters_of(tenant)]),
            prompt=[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 8, 20, 50]))],
            max_tokens=rng.choice([1, 4, 12, 30, 60, 90]),
            n=n,
            seed=rng.getrandbits(64),
            is_greedy=n == 1 and rng.random() < 0.3,
        )
        if len(call.prompt) > len(SHARED_PREFIX):
            call.prompt = [*SHARED_PREFIX, *call.prompt[len(SHARED_PREFIX) :]]
        return call

    def long(self, tenant: str, n: int = 3) -> Call:
        """A call whose answer takes a second at least; of one choice it is greedy."""
        while True:
            call = self.plain(tenant)
            call.n, call.is_greedy, call.max_tokens = n, n == 1, LONG_TOKENS
            if max(len(call.reference(choice)) for choice in range(call.n)) > LONG_TOKENS // 2:
                return call

    async def _run(self, call: Call) -> None:
        address = self._address(call.router)
        metadata = {"x-tenant-id": call.tenant, **bearer(self._cluster.key)}
        if call.qos_class:
            metadata["x-request-class"] = call.qos_class
        if call.adapter:
            metadata["x-adapter-id"] = call.adapter
        sampling = common_pb2.SamplingParams(seed=call.seed)
        if call.is_greedy:
            sampling.temperature = 0.0
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=call.prompt),
            max_tokens=call.max_tokens,
            sampling=sampling,
            stop=[call.stop] if call.stop else [],
            n=call.n,
            ignore_eos=call.ignores_eos,
        )
        channel = self._transport.connect(address)
        try:
            await self._read(call, channel.stream(GENERATE, request, timeout=call.timeout_s, metadata=metadata))
            while call.is_after_heal and call.is_overloaded and call.overload_retries < MAX_OVERLOAD_RETRIES:
                assert call.error is not None
                assert call.error.retry_after_s is not None, "overload is said without a hint"
                call.overload_retries += 1
                await asyncio.sleep(call.error.retry_after_s)
                call.error = None
                await self._read(call, channel.stream(GENERATE, request, timeout=call.timeout_s, metadata=metadata))
        finally:
            await channel.close()
            call.ended_at = self._cluster.loop.time()

    async def _read(self, call: Call, stream: Stream) -> None:
        try:
            while call.cancel_after_frames is None or len(call.frames) < call.cancel_after_frames:
                frame = await stream.read()
                if frame is None:
                    break
                call.frames.append(frame)
                call.frame_times.append(self._cluster.loop.time())
                if call.read_pause_s:
                    call.longest_pause_s = max(call.longest_pause_s, call.read_pause_s)
                    await asyncio.sleep(call.read_pause_s)
            else:
                call.is_cancelled = True
                stream.cancel()
        except RpcError as e:
            call.error = e

    def _address(self, router: str) -> str:
        """Where the router is, or was."""
        app = self._cluster.processes[router].app
        return app.address if app is not None else "127.0.0.1:1"
