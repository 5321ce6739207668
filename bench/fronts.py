"""What HTTP costs beside gRPC: the same streams through one router process, by both fronts in alternating rounds.

Cluster and load are those of hop.py: real services, workers whose engine is a paced fake.

    latency      closed-loop streams far below what the machine carries, an event a token: time to the first token
    throughput   128 streams that two workers serve as fast as the machine lets them: tokens/s, and tokens for a second
                 of the router's CPU, which say what it would carry alone
    short        the same with answers of one to three tokens: what a request costs
    open         `--open` server-sent streams at once, thrice: how many end whole, and the router's memory and sockets

Prints JSON lines: {"bench": "fronts", "case", ...}; `compared` ones have HTTP's ratio to gRPC, or difference.

    python -m bench.fronts [--seconds 24] [--open 1000] [--only latency]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import psutil
from manylora.client.credentials import read_key
from manylora_shared.transport.grpc_transport import GrpcTransport

from bench.hop import TENANT, Measured, Request, cluster, drive, emit, length, prompt, quantiles, through_router

OPEN_ROUNDS = 3
OPEN_TOKENS = 64
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass
class Path:
    request: Request
    measured: Measured = field(default_factory=Measured)
    took_s: float = 0.0
    cpu_s: float = 0.0


def over_http(address: str, key: str, max_tokens: int, *, tells_ids: bool) -> Request:
    """Completions as events, on kept connections, by a client that costs next to nothing.

    tells_ids: each token has an event, as over gRPC; else each text, and half of the fake's first tokens have none.
    """
    host, _, port = address.rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(seed: int, measured: Measured) -> None:
        body = {"prompt": prompt(seed), "max_tokens": length(seed, max_tokens), "ignore_eos": True, "seed": seed}
        more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": tells_ids}
        data = json.dumps({**body, **more}).encode()
        lines = ["POST /v1/completions HTTP/1.1", f"host: {address}", f"authorization: Bearer {key}"]
        lines += [f"x-tenant-id: {TENANT}", f"content-length: {len(data)}", "", ""]
        started = time.perf_counter()
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        writer.write("\r\n".join(lines).encode() + data)
        first, tail = True, b""
        while not tail.endswith(DONE):
            part = await reader.read(1 << 16)
            assert part, "the router closed a stream"
            events = (
                part.count(b'"token_ids":[') - part.count(b'"token_ids":[]') if tells_ids else part.count(b'"text":')
            )
            measured.messages += events
            if first and events:
                measured.ttft_ms.append((time.perf_counter() - started) * 1e3)
                first = False
            tail = (tail + part)[-1000:]
        measured.tokens += int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])
        idle.append((reader, writer))

    return request


async def by_turns(
    streams: int, seconds: float, step_ms: float, max_tokens: int, *, tells_ids: bool
) -> dict[str, Path]:
    rng = random.Random(streams)
    async with cluster(step_ms, workers=2) as running:
        router = psutil.Process(running.pids["router-0"])
        channel = GrpcTransport().connect(running.router)
        key = read_key(running.key_file)
        http = over_http(running.http_addresses[0], key, max_tokens, tells_ids=tells_ids)
        paths = {"grpc": Path(through_router(channel, key, max_tokens)), "http": Path(http)}
        for path in paths.values():
            await drive(path.request, streams, 1.0, Measured(), rng)
        for name in ("grpc", "http", "http", "grpc", "grpc", "http"):
            path, before = paths[name], router.cpu_times()
            path.took_s += await drive(path.request, streams, seconds / 6, path.measured, rng)
            after = router.cpu_times()
            path.cpu_s += after.user + after.system - before.user - before.system
        await channel.close()
    return paths


async def latency(streams: int, seconds: float, step_ms: float) -> None:
    paths = await by_turns(streams, seconds, step_ms, max_tokens=8, tells_ids=True)
    p50 = {}
    for name, path in paths.items():
        p50[name], p99 = quantiles(path.measured.ttft_ms)
        requests = len(path.measured.ttft_ms)
        tell(case="latency", front=name, streams=streams, requests=requests, ttft_ms_p50=p50[name], ttft_ms_p99=p99)
    tell(case="latency-compared", streams=streams, ttft_ms_p50_more=p50["http"] - p50["grpc"])


async def throughput(case: str, streams: int, seconds: float, step_ms: float, max_tokens: int) -> None:
    paths = await by_turns(streams, seconds, step_ms, max_tokens, tells_ids=False)
    for name, path in paths.items():
        tell(
            case=case,
            front=name,
            streams=streams,
            tokens_per_s=path.measured.tokens / path.took_s,
            tokens_per_router_cpu_s=path.measured.tokens / path.cpu_s,
            router_cpu_share=path.cpu_s / path.took_s,
        )
    rates = {name: path.measured.tokens / path.took_s for name, path in paths.items()}
    per_cpu = {name: path.measured.tokens / path.cpu_s for name, path in paths.items()}
    ratios = {
        "tokens_per_s_ratio": rates["http"] / rates["grpc"],
        "tokens_per_cpu_ratio": per_cpu["http"] / per_cpu["grpc"],
    }
    tell(case=f"{case}-compared", streams=streams, **ratios)


async def open_streams(streams: int, step_ms: float) -> None:
    """Each on a connection of its own."""
    async with cluster(step_ms, workers=2, slots=512) as running:
        router = psutil.Process(running.pids["router-0"])
        key = read_key(running.key_file)
        for number in range(OPEN_ROUNDS):
            before, peak, connections = router.memory_info().rss, 0, 0
            ends = [Measured() for _ in range(streams)]
            started = time.perf_counter()
            tasks = [
                asyncio.ensure_future(
                    over_http(running.http_addresses[0], key, OPEN_TOKENS, tells_ids=False)(seed, its)
                )
                for seed, its in enumerate(ends)
            ]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.25)
                peak = max(peak, router.memory_info().rss)
                connections = max(connections, len(router.net_connections("tcp")))
            await asyncio.gather(*tasks)
            tell(
                case="open",
                round=number,
                streams=streams,
                whole=sum(its.tokens == length(seed, OPEN_TOKENS) for seed, its in enumerate(ends)),
                seconds=time.perf_counter() - started,
                router_mib_before=before / (1 << 20),
                router_mib_most=peak / (1 << 20),
                router_connections_most=connections,
            )


def tell(**values: object) -> None:
    emit("fronts", **values)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--only", default="", help="a case alone: latency, throughput or open")
    arguments = parser.parse_args()
    if arguments.only in ("", "latency"):
        await latency(1, arguments.seconds, step_ms=20.0)
        await latency(16, arguments.seconds, step_ms=20.0)
    if arguments.only in ("", "throughput"):
        await throughput("throughput", 128, arguments.seconds, step_ms=2.0, max_tokens=192)
        await throughput("short", 128, arguments.seconds, step_ms=2.0, max_tokens=2)
    if arguments.only in ("", "open"):
        await open_streams(arguments.open, step_ms=50.0)


if __name__ == "__main__":
    asyncio.run(main())
