"""Step curves for `manylora plan`, made of what the benchmarks have written into bench/results.

    python -m bench.curves            writes shared/manylora/capacity/curves.json
    python -m bench.curves --check    says what differs from it, and ends with 1

What a step with adapters takes beyond one without is fitted, without negative parts, over all measured steps of the
GPU and shape: a constant, a part for each row, one for each rank of the distinct adapters, one for the greatest rank.
Where all adapters had one rank, the fit has a constant and the sum of ranks alone. Prompts that were not measured with
a pair are those of another GPU or of the reference shape, by multiplications.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from manylora.capacity.files import CURVES
from manylora.capacity.planning.curve import floor_ms, kv_token_ms
from manylora.capacity.planning.shapes import CONFIGS, GPUS, SHAPES, shape_of

RESULTS = Path(__file__).parent / "results"
MACHINES = {"H100": "h100", "H200": "h200"}
ENGINE_FILES = ("engine.jsonl", "engine-composed.jsonl", "engine-hybrid.jsonl", "engine-mixture.jsonl")
REFERENCE = "llama-3.1-8b"
FORMATS = ("fp8", "int4", "nf4")
ADAPTER_CASES = ("decode-one", "decode-distinct", "mixed-rank", "composed/alone")
ENOUGH_ROWS = 64  # else another GPU's are nearer than what is drawn on from there
CONTEXT = 256  # of all that is told for weights in fewer bits
VICTIM_PROMPT_TOKENS = 32  # of bench/isolation.py
LOAD_DEVICE_MB_S = 20_000.0  # assumed: less than half of what a PCI Express 5 link of 16 lanes carries
Line = Mapping[str, Any]


def lines(machine: str, name: str) -> list[Line]:
    path = RESULTS / machine / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def features(line: Line) -> list[float]:
    """Constant, rows, sum of the distinct adapters' ranks, greatest rank."""
    ranks = line["rank"] if isinstance(line["rank"], list) else [line["rank"]]
    taken = list(itertools.islice(itertools.cycle(ranks), line["adapters"]))
    return [1.0, line["batch"], sum(taken), max(taken)]


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares of relative errors without negative parts: the best of the fits to any choice of the features."""
    matrix, wanted = np.array(rows), np.array(values)
    best: tuple[float, list[float]] = (float("inf"), [0.0] * matrix.shape[1])
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(((part @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < best[0]:
                parts = dict(zip(chosen, found.tolist(), strict=True))
                best = (error, [parts.get(index, 0.0) for index in range(matrix.shape[1])])
    return best[1]


def curve(gpu: str, shape: str, measured: Sequence[Line], prompts: Mapping[str, float], service_ms: float) -> Line:
    """prompts: milliseconds a token, by case."""
    base = base_of(measured)
    rows = [line for line in measured if line["case"] in ADAPTER_CASES and line["batch"] in base]
    told = [features(line) for line in rows]
    if len({(found[2] / line["adapters"], found[3]) for found, line in zip(told, rows, strict=True)}) == 1:
        told = [[one, 0.0, ranks, 0.0] for one, _, ranks, _ in told]
    adapter, row, rank, greatest = fit(told, [line["ms_per_step"] - base[line["batch"]] for line in rows])
    context = next(line["context"] for line in measured if line["case"] == "decode-base")
    (reads,) = [line for line in lines("h200", "adapter_reads.jsonl") if line["case"] == "of_a_known_kind"]
    values: dict[str, Any] = {
        "context": context,
        "kv_token_ms": kv_token_ms(GPUS[gpu], SHAPES[shape]),
        "adapter_ms": adapter,
        "row_ms": row,
        "rank_ms": rank,
        "max_rank_ms": greatest,
        "prompt_token_ms": prompts["prefill-base"],
        "adapter_prompt_token_ms": prompts["prefill-distinct"],
        "service_ms": service_ms,
        "load_host_mb_s": reads["file_bytes"] / reads["p50_ms"] / 1e3,
        "load_device_mb_s": LOAD_DEVICE_MB_S,
    }
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    return {"gpu": gpu, "shape": shape, "points": sorted(base.items()), **rounded, "is_measured": True}


def base_of(measured: Sequence[Line]) -> dict[int, float]:
    return {line["batch"]: line["ms_per_step"] for line in measured if line["case"] == "decode-base"}


def chunk_ms(found: Sequence[Line]) -> dict[str, float]:
    """Of a prompt's token."""
    prefills = [line for line in found if line["case"].startswith("prefill") and line["context"] == 512]
    return {line["case"]: 1e3 / line["tokens_per_s"] for line in prefills}


def prompts_of(gpu: str, shape: str, by_gpu: Mapping[str, Sequence[Line]]) -> tuple[dict[str, float], str]:
    """And where they are from, if not of this pair."""
    other = next(name for name in by_gpu if name != gpu)
    ways = (
        (gpu, shape, ""),
        (other, shape, other),
        *((each, REFERENCE, f"{REFERENCE} on {each}") for each in (gpu, other)),
    )
    for source, of, where in ways:
        found = chunk_ms([line for line in by_gpu[source] if line["shape"] == of])
        if found:
            elements = SHAPES[shape].row_elements / SHAPES[of].row_elements
            times = elements * GPUS[source].matrix_tflops / GPUS[gpu].matrix_tflops
            return {case: ms * times for case, ms in found.items()}, where
    raise ValueError(f"no prompt was measured for {shape} on {gpu}")


def service_ms(gpu: str, found: Sequence[Line], prompts: Mapping[str, float]) -> float:
    """The way through the services, of the shape that bench/isolation.py serves."""
    alone = [line for line in lines(MACHINES[gpu], "isolation.jsonl") if line["attack"] == "none"]
    waits: list[float] = [line["victim_ttft_p50_ms"] for line in alone]
    base = base_of([line for line in found if line["shape"] == REFERENCE])
    first_ms = min(base.values()) + VICTIM_PROMPT_TOKENS * prompts["prefill-base"]
    return max(0.0, statistics.median(waits) - first_ms)


def quantized(gpu: str, shape: str, base: Mapping[int, float]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """By format, what a step takes beyond one of bf16 and what fewer bytes save. NF4's kernels of layers are int4's."""
    found: dict[str, dict[int, float]] = {}
    for kind in FORMATS:
        name = "engine-mixture.jsonl" if SHAPES[shape].experts else f"engine-{kind}.jsonl"
        file = [line for line in lines(MACHINES[gpu], name) if line["shape"] == shape]
        beside = base_of([line for line in file if line["quantization"] == "none"]) or base
        own = base_of([line for line in file if line["quantization"] == kind])
        thin = shape_of(CONFIGS[shape], shape, kind)
        found[kind] = dict(found.get("int4", {})) if kind == "nf4" else {}
        for rows, ms in own.items():
            floors = [floor_ms(GPUS[gpu], each, rows, CONTEXT) for each in (SHAPES[shape], thin)]
            found[kind][rows] = round(ms - beside[rows] + floors[0] - floors[1], 4)
        if max(found[kind], default=0) >= ENOUGH_ROWS:
            yield kind, sorted(found[kind].items())


def of_two(gpu: str, shape: str) -> dict[str, list[tuple[int, float]]]:
    """Steps of two GPUs, by how they sum; of the reference shape alone, by which others' are told."""
    found = [line for line in lines(MACHINES[gpu], "engine-two-gpus.jsonl") if line.get("tensor_parallel") == 2]
    own = [line for line in found if line["shape"] == shape == REFERENCE and line["quantization"] == "none"]
    kinds = sorted({line["all_reduce"] for line in own})
    return {kind: sorted(base_of([line for line in own if line["all_reduce"] == kind]).items()) for kind in kinds}


def curves() -> Iterator[Line]:
    by_gpu = {
        gpu: [line for name in ENGINE_FILES for line in lines(machine, name) if line["quantization"] == "none"]
        for gpu, machine in MACHINES.items()
    }
    for gpu, found in by_gpu.items():
        for shape in SHAPES:
            measured = [line for line in found if line["shape"] == shape]
            if not base_of(measured):
                continue
            prompts, where = prompts_of(gpu, shape, by_gpu)
            date = next(line["date"] for line in measured if line["case"] == "versions")
            origin = f"measured on {date}" + (f"; prompts estimated from {where}" if where else "")
            way_ms = service_ms(gpu, found, prompts_of(gpu, REFERENCE, by_gpu)[0])
            of_formats = dict(quantized(gpu, shape, base_of(measured)))
            more: dict[str, Any] = {"quantized": of_formats, "of_two": of_two(gpu, shape)}
            more = {name: found for name, found in more.items() if found}
            yield {**curve(gpu, shape, measured, prompts, way_ms), **more, "origin": origin}


def written(found: Sequence[Line]) -> str:
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = written(list(curves()))
    if not parser.parse_args().check:
        CURVES.write_text(text)
    elif CURVES.read_text() != text:
        sys.exit(f"{CURVES.name} is not what bench/results say; run python -m bench.curves")


if __name__ == "__main__":
    main()
