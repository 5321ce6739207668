"""What router and scheduler add to a request, and what one router process carries.

Real processes on loopback: etcd, a scheduler, a router, and a worker whose engine is a paced fake (one step every
`--step-ms`, no torch), so that every millisecond beyond the worker's own is the services'. All share the
machine's cores with the load generator.

    added TTFT   the same closed-loop streams against the worker's Execute alone and through the router, in alternating
                 rounds of one run; the difference of the two distributions' p50 and p99
    carried      two workers that produce as much as this machine lets them; tokens/s that reach the callers through
                 one router, messages they came in, and the router's CPU time for them

Prints JSON lines: {"bench": "hop", "case", "streams", ...}.

    python bench/hop.py [--streams 1,64,256] [--seconds 12] [--step-ms 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import manylora
import psutil
from manylora.client import Client
from manylora.client.credentials import read_key
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora.v1 import common_pb2, inference_pb2, worker_pb2
from manylora_shared.coordination.peers import PeerSecret, PeerTransport, read_secret
from manylora_shared.tenancy.identity import bearer
from manylora_shared.transport.base import Channel, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport

MODEL = Path(manylora.__file__).parent / "demo" / "assets" / "base"
TENANT = "bench"
PROMPT_TOKENS = 64
SLOTS = 320
GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
EXECUTE = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["Execute"]


@dataclass
class Measured:
    """What the streams of one path saw."""

    ttft_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    messages: int = 0


Request = Callable[[int, Measured], Awaitable[None]]


@asynccontextmanager
async def cluster(step_ms: float, workers: int = 1, slots: int = SLOTS) -> AsyncIterator[LocalCluster]:
    """A cluster of one router and fake workers with the tenant in place."""
    flags = (f"--fake-step-ms={step_ms}", f"--sequence-slots={slots}", "--num-blocks=20000")
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=MODEL,
            model_name="fake",
            data=Path(data),
            workers=workers,
            worker_flags=flags,
            worker_module="manylora_sim.worker",
            http_port=0,
        )
        async with LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running:
            async with Client(running.router) as client:
                await client.tenants.apply(f"tenant_id: {TENANT}")
            yield running


def through_router(channel: Channel, key: str, max_tokens: int) -> Request:
    metadata = {"x-tenant-id": TENANT, **bearer(key)}

    async def request(seed: int, measured: Measured) -> None:
        message = inference_pb2.GenerateRequest(max_tokens=length(seed, max_tokens), ignore_eos=True)
        message.token_ids.ids.extend(prompt(seed))
        message.sampling.seed = seed
        started = time.perf_counter()
        stream = channel.stream(GENERATE, message, metadata=metadata)
        first = True
        while (response := await stream.read()) is not None:
            measured.messages += 1
            if response.HasField("delta") and response.delta.token_ids:
                if first:
                    measured.ttft_ms.append((time.perf_counter() - started) * 1e3)
                    first = False
                measured.tokens += len(response.delta.token_ids)

    return request


def to_worker(channel: Channel, max_tokens: int, epoch: int) -> Request:
    async def request(seed: int, measured: Measured) -> None:
        message = worker_pb2.ExecuteRequest(
            request_id=f"hop-{seed}",
            epoch=epoch,
            tenant_id=TENANT,
            qos_class=common_pb2.QOS_CLASS_STANDARD,
            prompt_token_ids=prompt(seed),
            max_tokens=length(seed, max_tokens),
            sampling=common_pb2.SamplingParams(seed=seed),
            n=1,
        )
        started = time.perf_counter()
        stream = channel.stream(EXECUTE, message)
        first = True
        while (response := await stream.read()) is not None:
            measured.messages += 1
            if response.WhichOneof("event") == "tokens":
                if first:
                    measured.ttft_ms.append((time.perf_counter() - started) * 1e3)
                    first = False
                measured.tokens += sum(len(choice.token_ids) for choice in response.tokens.choices)

    return request


async def drive(request: Request, streams: int, seconds: float, measured: Measured, rng: random.Random) -> float:
    """`streams` closed loops for `seconds`; returns the seconds until the last of them had ended."""
    started = time.perf_counter()

    async def loop() -> None:
        await asyncio.sleep(rng.uniform(0, min(1.0, 0.01 * streams)))
        while time.perf_counter() - started < seconds:
            await request(rng.getrandbits(40), measured)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(loop())
    return time.perf_counter() - started


async def added_ttft(streams: int, seconds: float, step_ms: float, rounds: int = 3) -> None:
    max_tokens = 4 if streams == 1 else 128
    rng = random.Random(streams)
    direct, routed = Measured(), Measured()
    async with cluster(step_ms) as running, Client(running.router) as client:
        status = await client.status()
        transport = GrpcTransport()
        router = transport.connect(running.router)
        secret = PeerSecret(read_secret(running.peer_secret_file))
        worker = PeerTransport(transport, secret).connect(status.workers[0].address)
        paths = [
            (direct, to_worker(worker, max_tokens, status.scheduler.epoch)),
            (routed, through_router(router, read_key(running.key_file), max_tokens)),
        ]
        for _, request in paths:
            await drive(request, streams, 1.0, Measured(), rng)
        for _ in range(rounds):
            for measured, request in paths:
                await drive(request, streams, seconds / rounds, measured, rng)
        await router.close()
        await worker.close()
    d50, d99 = quantiles(direct.ttft_ms)
    r50, r99 = quantiles(routed.ttft_ms)
    emit(
        case="added-ttft",
        streams=streams,
        requests=len(routed.ttft_ms),
        worker_ttft_ms_p50=d50,
        worker_ttft_ms_p99=d99,
        router_ttft_ms_p50=r50,
        router_ttft_ms_p99=r99,
        added_ms_p50=r50 - d50,
        added_ms_p99=r99 - d99,
    )


async def carried(streams: int, seconds: float, step_ms: float) -> None:
    rng = random.Random(7)
    measured = Measured()
    async with cluster(step_ms, workers=2) as running:
        router = psutil.Process(running.pids["router-0"])
        channel = GrpcTransport().connect(running.router)
        request = through_router(channel, read_key(running.key_file), 192)
        await drive(request, streams, 1.0, Measured(), rng)
        before = router.cpu_times()
        took_s = await drive(request, streams, seconds, measured, rng)
        after = router.cpu_times()
        await channel.close()
    cpu_s = after.user + after.system - before.user - before.system
    emit(
        case="carried",
        streams=streams,
        tokens_per_s=measured.tokens / took_s,
        messages_per_s=measured.messages / took_s,
        tokens_per_message=measured.tokens / measured.messages,
        router_cpu_share=cpu_s / took_s,
        tokens_per_router_cpu_s=measured.tokens / cpu_s,
    )


def emit(bench: str = "hop", **values: object) -> None:
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"bench": bench, **rounded}), flush=True)


def prompt(seed: int) -> list[int]:
    return [3 + (seed + i) % 250 for i in range(PROMPT_TOKENS)]


def length(seed: int, mean_tokens: int) -> int:
    """Half to one and a half times the mean, so that the loops do not fall into step."""
    return mean_tokens // 2 + seed % (mean_tokens + 1)


def quantiles(values: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--fast-step-ms", type=float, default=2.0, help="the pace of the worker that floods the router")
    parser.add_argument("--only", default="", help="a case alone: added-ttft or carried")
    arguments = parser.parse_args()
    if arguments.only in ("", "added-ttft"):
        for streams in map(int, arguments.streams.split(",")):
            await added_ttft(streams, arguments.seconds, arguments.step_ms)
    if arguments.only in ("", "carried"):
        await carried(128, arguments.seconds, arguments.fast_step_ms)


if __name__ == "__main__":
    asyncio.run(main())
