"""A plan against what it plans: measures a cluster's step curve, plans a mix by it, and sends the mix.

One real cluster on this machine (etcd, scheduler, router, one worker). The curve is measured from outside, by closed
loops of `manylora load`: the time between tokens at several numbers of streams, without adapters and with one each;
what longer prompts cost a full batch; the first token of a caller that is alone. Then Poisson requests at `--load` of
what the curve says that the worker can do, with adapters by Zipf's law: planned for one worker, and sent. Where the
GPU has a packaged curve of that shape, which `manylora plan` takes, its prediction stands beside.

    python -m bench.shapes --device cuda FOLDER && python -m bench.plan_check --device cuda --model FOLDER --gpu H100
    python -m bench.plan_check                      the demo's model on the CPU

Prints one JSON line: {"bench": "plan_check", "predicted": {...}, "error": {...}, "seen": {...}, "packaged": {...} or
null, "curve": {...}}; an error is predicted by seen, less 1. `--curve-out FILE` keeps the curve for `plan --curve`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from manylora.capacity.files import packaged_curves, read_mix, read_shape
from manylora.capacity.planning.curve import Curve, curve_of, find_curve, kv_token_ms
from manylora.capacity.planning.plan import Wanted, plan
from manylora.capacity.planning.shapes import Gpu, gpu_of
from manylora.capacity.planning.traffic import Traffic, traffic_of_mix
from manylora.client import Client
from manylora.client.credentials import KEY_VARIABLE, read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster

from bench.curves import LOAD_DEVICE_MB_S, fit

TENANT = "bench"
CPU = Gpu("CPU", 16.0, 0.02, 0.1)
SHORT, LONG = 16, 256  # tokens of a prompt: both are one chunk
PROMPT_STREAMS = 32  # at which the cost of prompts is measured
CONTEXT = 72  # in the mean, of the closed loops
PARTS = ("tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms")


@dataclass(frozen=True)
class Bench:
    arguments: argparse.Namespace
    url: str
    key: str
    adapters: Sequence[str]
    rank: int

    async def load(self, **mix: Any) -> Mapping[str, Any]:
        """What a process of `manylora load` tells of all its requests."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            shown = {"return_token_ids": True}  # a model of bench.shapes has no texts
            yaml.safe_dump({"url": self.url, "prompts": "ids", "body": shown, **mix}, file)
            file.flush()
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "manylora", "load", file.name, "--json", stdout=asyncio.subprocess.PIPE,
                env={**os.environ, KEY_VARIABLE: self.key},
            )  # fmt: skip
            out, _ = await child.communicate()
        found = json.loads(out)
        if "total" not in found or not found["total"]["completed"]:
            raise RuntimeError(f"the load failed: {found}")
        total: Mapping[str, Any] = found["total"]
        return total

    async def closed(
        self, streams: int, prompt: int, output: int | Mapping[str, float], adapters: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        tenant = {
            "tenant_id": TENANT,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "adapters": [*adapters],
            "zipf": 0,
        }
        seconds = self.arguments.seconds if isinstance(output, int) else 2 * self.arguments.seconds
        return await self.load(
            arrivals={"kind": "closed", "streams": streams},
            duration_s=seconds,
            warmup_s=seconds / 4,
            tenants={TENANT: tenant},
        )


async def measured(bench: Bench, gpu: Gpu) -> dict[str, Any]:
    """A curve's document."""
    arguments = bench.arguments
    shape = read_shape(str(model_folder(arguments)))
    await bench.closed(8, SHORT, 32, bench.adapters)  # what is slow once, and adapters to the device
    base: list[tuple[int, float]] = []
    rows, beyond = [], []
    for streams in arguments.streams:
        plain = (await bench.closed(streams, SHORT, 2 * (CONTEXT - SHORT)))["tpot_ms"]["p50"]
        base.append((streams, max(plain, base[-1][1] if base else 0.0)))
        if bench.adapters:
            found = await bench.closed(streams, SHORT, 2 * (CONTEXT - SHORT), bench.adapters)
            count = len(bench.adapters)
            distinct = count * (1 - (1 - 1 / count) ** streams)
            rows.append([1.0, float(streams), bench.rank * distinct])
            beyond.append(max(0.0, found["tpot_ms"]["p50"] - base[-1][1]))
    adapter, row, rank = fit(rows, beyond) if rows else (0.0, 0.0, 0.0)
    kv_ms = kv_token_ms(gpu, shape)
    prompt_ms = await prompt_token_ms(bench, kv_ms)
    adapter_prompt_ms = await prompt_token_ms(bench, kv_ms, bench.adapters) if bench.adapters else prompt_ms
    short = (await bench.closed(1, SHORT, 2))["ttft_ms"]["p50"]
    return {
        "gpu": asdict(gpu),
        "shape": asdict(shape),
        "points": base,
        "context": CONTEXT,
        "kv_token_ms": kv_ms,
        "adapter_ms": adapter,
        "row_ms": row,
        "rank_ms": rank,
        "max_rank_ms": 0.0,
        "prompt_token_ms": prompt_ms,
        "adapter_prompt_token_ms": adapter_prompt_ms,
        "service_ms": max(0.0, short - base[0][1] - SHORT * prompt_ms),
        "load_host_mb_s": 500.0,
        "load_device_mb_s": LOAD_DEVICE_MB_S,
        "is_measured": True,
        "origin": f"measured on {datetime.date.today()} by bench/plan_check.py",
        "is_ahead": arguments.device != "cpu",
    }


async def prompt_token_ms(bench: Bench, kv_ms: float, adapters: Sequence[str] = ()) -> float:
    """What a prompt's token adds to a batch that decodes. A caller alone does not tell it: a GPU multiplies by some
    hundred tokens while it reads the weights, so that they seem to cost a third of it. Outputs differ in length, for
    else all prompts come at once.
    """
    output = 2 * (CONTEXT - SHORT)
    sizes = {"mean": output, "cv": 0.5, "min": 4, "max": 3 * output}
    streams = min(PROMPT_STREAMS, bench.arguments.slots)
    request_ms: list[float] = []
    for tokens in (SHORT, LONG):
        total = await bench.closed(streams, tokens, sizes, adapters)
        mean_output = total["output_tokens"] / total["completed"]
        request_ms.append(float(total["e2e_ms"]["mean"] / streams * output / mean_output))
    return max(1e-4, (request_ms[1] - request_ms[0]) / (LONG - SHORT) - output * kv_ms)


def mix_of_load(bench: Bench, curve: Curve) -> dict[str, Any]:
    """Requests at `--load` of what the worker can do."""
    arguments = bench.arguments
    prompt, output, rows = arguments.prompt, arguments.output, 32
    step = curve.step_ms(rows, rows * (prompt + output // 2), sum_ranks=bench.rank * min(rows, len(bench.adapters)))
    rate = arguments.load * 1e3 / (output * step / rows + prompt * curve.prompt_token_ms)
    sizes = {
        "prompt_tokens": {"mean": prompt, "cv": 0.8, "min": 8, "max": 4 * prompt},
        "output_tokens": {"mean": output, "cv": 0.6, "min": 4, "max": 4 * output},
    }
    return {
        "arrivals": {"kind": "poisson", "rate": round(rate, 3)},
        "duration_s": arguments.load_seconds,
        "tenants": {TENANT: {"tenant_id": TENANT, **sizes, "adapters": list(bench.adapters), "rank": bench.rank}},
    }


def traffic_of(mix: Mapping[str, Any], seconds: float, rank: int) -> Traffic:
    return traffic_of_mix(read_mix(yaml.safe_dump(mix), "mix"), seconds=seconds, rank=rank)


def predicted(traffic: Traffic, curve: Curve, slots: int) -> dict[str, float]:
    """Of one worker."""
    outcome = plan(traffic, curve, Wanted(workers=1, slots=slots, spare=0.0)).expected
    return {
        "tokens_per_s": outcome.tokens_per_s,
        "ttft_p50_ms": outcome.percentile("ttft_ms", 0.5),
        "ttft_p95_ms": outcome.percentile("ttft_ms", 0.95),
        "tpot_p50_ms": outcome.percentile("tpot_ms", 0.5),
    }


async def check(bench: Bench) -> None:
    arguments = bench.arguments
    gpu = gpu_of(arguments.gpu) if arguments.gpu else CPU
    document = await measured(bench, gpu)
    if arguments.curve_out:
        arguments.curve_out.write_text(json.dumps(document, indent=1) + "\n")
    curve = curve_of(document)
    mix = mix_of_load(bench, curve)
    traffic = traffic_of(mix, arguments.load_seconds, bench.rank)
    expected = predicted(traffic, curve, arguments.slots)
    packaged = find_curve(packaged_curves(), gpu, curve.shape)
    total = await bench.load(**mix)
    seen = {
        "tokens_per_s": total["output_tokens_per_s"],
        "ttft_p50_ms": total["ttft_ms"]["p50"],
        "ttft_p95_ms": total["ttft_ms"]["p95"],
        "tpot_p50_ms": total["tpot_ms"]["p50"],
    }
    line = {
        "bench": "plan_check",
        "device": arguments.gpu or platform.machine(),
        "model": curve.shape.name,
        "date": str(datetime.date.today()),
        "slots": arguments.slots,
        "adapters": len(bench.adapters),
        "requests": total["requests"],
        "failed": total["errors"],
        "requests_per_s": round(traffic.requests_per_s, 3),
        "load": arguments.load,
        **compared(expected, seen),
        "seen": {name: round(seen[name], 2) for name in PARTS},
        "packaged": compared(predicted(traffic, packaged, arguments.slots), seen) if packaged.is_measured else None,
        "load_1m": os.getloadavg()[0],
        "curve": document,
    }
    print(json.dumps(line), flush=True)


def compared(expected: Mapping[str, float], seen: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    return {
        "predicted": {name: round(expected[name], 2) for name in PARTS},
        "error": {name: round(expected[name] / seen[name] - 1, 4) for name in PARTS},
    }


def model_folder(arguments: argparse.Namespace) -> Path:
    return Path(arguments.model) / "model" if arguments.model else Path(BASE_FOLDER)


async def add_adapters(client: Client, source: Path, count: int, folder: Path) -> list[str]:
    """Copies of one adapter that differ in two bytes of its weights."""
    names = [f"copy-{index}" for index in range(count)]
    shutil.copytree(source, folder / "copy")
    weights = folder / "copy" / "adapter_model.safetensors"
    for index, name in enumerate(names):
        with weights.open("r+b") as file:
            file.seek(weights.stat().st_size - 4)
            file.write(index.to_bytes(2, "little"))
        await client.adapters.add(TENANT, name, folder / "copy")
    return names


async def main() -> None:
    arguments = parse()
    source = Path(arguments.model) / "adapter" if arguments.model else Path(adapter_folder("words"))
    rank = json.loads((source / "adapter_config.json").read_text())["r"]
    adapter_mb = math.ceil((source / "adapter_model.safetensors").stat().st_size * 1.1 / (1 << 20))
    with tempfile.TemporaryDirectory() as data:
        options = ClusterOptions(
            model=model_folder(arguments),
            model_name="shape" if arguments.model else BASE_NAME,
            data=Path(data) / "cluster",
            device=arguments.device,
            http_port=0,
            sequence_slots=arguments.slots,
            device_adapter_mb=max(64, arguments.adapters * adapter_mb),
            host_adapter_mb=max(64, arguments.adapters * adapter_mb),
            worker_flags=("--prefix-cache-share=0",),
        )
        async with (
            LocalCluster(options, notify=lambda line: print(line, file=sys.stderr)) as running,
            Client(running.router) as client,
        ):
            await client.tenants.apply(f"tenant_id: {TENANT}\n", timeout_s=10)
            names = await add_adapters(client, source, arguments.adapters, Path(data))
            url = f"http://{running.http_addresses[0]}"
            await check(Bench(arguments, url, read_key(running.key_file), names, rank))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", default="", help="which one it is: H100, H200, ...")
    parser.add_argument("--model", help="a folder that bench/shapes.py has made, in place of the demo model")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--streams", default="1,4,16,32,64", help="at which the curve is measured")
    parser.add_argument("--adapters", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each point of the curve")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--load-seconds", type=float, default=40.0)
    parser.add_argument("--prompt", type=int, default=200, help="tokens, in the mean")
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--curve-out", type=Path)
    arguments = parser.parse_args()
    arguments.streams = [int(streams) for streams in arguments.streams.split(",")]
    return arguments


if __name__ == "__main__":
    asyncio.run(main())
