"""What reading an adapter from the store costs the thread that does it, from file to packed weights; JSON lines.

    python bench/adapter_reads.py [--model FOLDER] [--reads 200] [--json]

Copies of one adapter are read in turn: as the first of its kind, with every check, and by a reader that knows the kind
(packing.py). Both take turns, so that a slow minute hits both. `FOLDER` is as bench/shapes.py makes it; without, the
demo's model and one of its adapters.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora_worker.models.loader import load_model
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterLimits, read_adapter

COPIES = 8
"""So many files, that none is the one that was read last."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a model and its adapter/")
    parser.add_argument("--reads", type=int, default=200, help="of each kind")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model, adapter, name, dtype = BASE_FOLDER, adapter_folder("words"), BASE_NAME, torch.float32
    if arguments.model is not None:
        model, adapter, name = arguments.model / "model", arguments.model / "adapter", arguments.model.name
        dtype = torch.bfloat16
    base = load_model(str(model), name=name, dtype=dtype, threads=1).adapter_base()
    limits = AdapterLimits(max_rank=64)
    took_ms: dict[str, list[float]] = {"first_of_its_kind": [], "of_a_known_kind": []}
    known = Scratch()
    with tempfile.TemporaryDirectory() as temporary:
        copies = [Path(temporary, str(i)) for i in range(COPIES)]
        for copy in copies:
            shutil.copytree(adapter, copy)
            read_adapter(copy, base, limits, scratch=known)
        for i in range(arguments.reads):
            for kind, times in took_ms.items():
                scratch = known
                if kind == "first_of_its_kind":
                    scratch = Scratch()
                    scratch.take((adapter / "adapter_model.safetensors").stat().st_size).zero_()
                began = time.perf_counter()
                read_adapter(copies[i % COPIES], base, limits, scratch=scratch)
                times.append((time.perf_counter() - began) * 1e3)
    for kind, times in took_ms.items():
        line = {
            "bench": "adapter_reads",
            "case": kind,
            "file_bytes": (adapter / "adapter_model.safetensors").stat().st_size,
            "reads": len(times),
            "p50_ms": round(statistics.median(times), 3),
            "p95_ms": round(statistics.quantiles(times, n=20)[-1], 3),
            "model": name,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        print(json.dumps(line) if arguments.json else f"{kind:18} {line['p50_ms']:8.2f} / {line['p95_ms']:.2f} ms")


if __name__ == "__main__":
    main()
