"""Step curves for `manylora plan`, made of what the benchmarks have written into bench/results.

    python -m bench.curves            writes shared/manylora/capacity/curves.json
    python -m bench.curves --check    says what differs from it, and ends with 1

What a step with adapters takes beyond one without is fitted, without negative parts, over all measured steps of the
GPU and shape: a constant, a part for each row, one for each rank of the distinct adapters, one for the greatest rank.
What one GPU lacks (prompts) is taken of the other, by the multiplications a second of both.
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
from manylora.capacity.planning.curve import kv_token_ms
from manylora.capacity.planning.shapes import GPUS, SHAPES

RESULTS = Path(__file__).parent / "results"
MACHINES = {"H100": "h100", "H200": "h200"}
ENGINE_FILES = ("engine.jsonl", "engine-composed.jsonl")
ADAPTER_CASES = ("decode-one", "decode-distinct", "mixed-rank", "composed/alone")
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


def curve(gpu: str, shape: str, measured: Sequence[Line], prompts: Sequence[Line], alone: Sequence[Line]) -> Line:
    """`prompts`: of the GPU, or of the one that stands in for it."""
    base = {line["batch"]: line["ms_per_step"] for line in measured if line["case"] == "decode-base"}
    rows = [line for line in measured if line["case"] in ADAPTER_CASES and line["batch"] in base]
    adapter, row, rank, greatest = fit(
        [features(line) for line in rows], [line["ms_per_step"] - base[line["batch"]] for line in rows]
    )
    chunk = {line["case"]: 1e3 / line["tokens_per_s"] for line in prompts if line["context"] == 512}
    context = next(line["context"] for line in measured if line["case"] == "decode-base")
    waits = [line["victim_ttft_p50_ms"] for line in alone if line["attack"] == "none"]
    first_ms = min(base.values()) + VICTIM_PROMPT_TOKENS * chunk["prefill-base"]
    (reads,) = [line for line in lines("h200", "adapter_reads.jsonl") if line["case"] == "of_a_known_kind"]
    values: dict[str, Any] = {
        "context": context,
        "kv_token_ms": kv_token_ms(GPUS[gpu], SHAPES[shape]),
        "adapter_ms": adapter,
        "row_ms": row,
        "rank_ms": rank,
        "max_rank_ms": greatest,
        "prompt_token_ms": chunk["prefill-base"],
        "adapter_prompt_token_ms": chunk["prefill-distinct"],
        "service_ms": max(0.0, statistics.median(waits) - first_ms),
        "load_host_mb_s": reads["file_bytes"] / reads["p50_ms"] / 1e3,
        "load_device_mb_s": LOAD_DEVICE_MB_S,
    }
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    return {"gpu": gpu, "shape": shape, "points": sorted(base.items()), **rounded, "is_measured": True}


def curves() -> Iterator[Line]:
    by_gpu = {
        gpu: [line for name in ENGINE_FILES for line in lines(machine, name) if line["quantization"] == "none"]
        for gpu, machine in MACHINES.items()
    }
    for gpu, found in by_gpu.items():
        for shape in SHAPES:
            measured = [line for line in found if line["shape"] == shape]
            if not any(line["case"] == "decode-base" for line in measured):
                continue
            own = [line for line in measured if line["case"].startswith("prefill")]
            other = next(name for name in by_gpu if name != gpu)
            prompts = own or [
                {**line, "tokens_per_s": line["tokens_per_s"] * GPUS[gpu].matrix_tflops / GPUS[other].matrix_tflops}
                for line in by_gpu[other]
                if line["shape"] == shape and line["case"].startswith("prefill")
            ]
            date = next(line["date"] for line in measured if line["case"] == "versions")
            origin = f"measured on {date}" + ("" if own else f"; prompts estimated from {other}")
            alone = lines(MACHINES[gpu], "isolation.jsonl")
            yield {**curve(gpu, shape, measured, prompts, alone), "origin": origin}


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
