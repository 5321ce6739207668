"""What reading an adapter from the store costs the thread that does it, from file to packed weights; JSON lines.

    python bench/adapter_reads.py [--model FOLDER] [--reads 200] [--json]

Copies of one adapter are read in turn: as the first of its kind, with every check; by a reader that knows the kind
(packing.py); and by the same reader from sealed files. All take turns, so that a slow minute hits all. `FOLDER` is as
bench/shapes.py makes it; without, the demo's model and one of its adapters. Last comes a large file alone, plain and
sealed, from the page cache into memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora_shared.encryption.sealing import KEY_BYTES, DataKey, OneKey
from manylora_shared.stores.adapter_files import FILE_NAMES, WEIGHTS_NAME
from manylora_shared.stores.stored_files import FileSealer
from manylora_worker.models.loader import load_model
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterLimits, open_adapter_file, read_adapter

COPIES = 8
"""So many files, that none is the one that was read last."""
LARGE_BYTES = 80 << 20
LARGE_READS = 40


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a model and its adapter/")
    parser.add_argument("--reads", type=int, default=200, help="of each kind")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    return parser.parse_args()


def seal_folder(source: Path, target: Path, keys: OneKey) -> None:
    target.mkdir()
    for name in FILE_NAMES:
        seal_file(source / name, target / name, keys)


def seal_file(source: Path, target: Path, keys: OneKey) -> None:
    sealer = FileSealer(target, keys.opening("acme", "00" * 16))
    sealer.add(source.read_bytes())
    sealer.end()


def large_file(folder: Path, keys: OneKey, reads: int) -> dict[str, list[float]]:
    """Of the size that an adapter of rank 16 on all layers has at 8B."""
    paths = {"large_file": folder / "plain" / WEIGHTS_NAME, "sealed_large_file": folder / "sealed" / WEIGHTS_NAME}
    for path in paths.values():
        path.parent.mkdir()
    paths["large_file"].write_bytes(secrets.token_bytes(LARGE_BYTES))
    seal_file(paths["large_file"], paths["sealed_large_file"], keys)
    took_ms: dict[str, list[float]] = {kind: [] for kind in paths}
    memory = torch.zeros(LARGE_BYTES, dtype=torch.uint8).numpy()
    for _ in range(min(reads, LARGE_READS)):
        for kind, path in paths.items():
            began = time.perf_counter()
            with open_adapter_file(path, keys) as file:
                assert file.fill(memory)
            took_ms[kind].append((time.perf_counter() - began) * 1e3)
    return took_ms


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model, adapter, name, dtype = BASE_FOLDER, adapter_folder("words"), BASE_NAME, torch.float32
    if arguments.model is not None:
        model, adapter, name = arguments.model / "model", arguments.model / "adapter", arguments.model.name
        dtype = torch.bfloat16
    base = load_model(str(model), name=name, dtype=dtype, threads=1).adapter_base()
    limits = AdapterLimits(max_rank=64)
    took_ms: dict[str, list[float]] = {"first_of_its_kind": [], "of_a_known_kind": [], "sealed_of_a_known_kind": []}
    keys = OneKey(DataKey("acme", "00" * 16, secrets.token_bytes(KEY_BYTES)))
    known = Scratch()
    with tempfile.TemporaryDirectory() as temporary:
        copies = [Path(temporary, str(i)) for i in range(COPIES)]
        for copy in copies:
            shutil.copytree(adapter, copy)
            read_adapter(copy, base, limits, scratch=known)
            seal_folder(copy, Path(f"{copy}-sealed"), keys)
        for i in range(arguments.reads):
            for kind, times in took_ms.items():
                scratch = known
                if kind == "first_of_its_kind":
                    scratch = Scratch()
                    scratch.take((adapter / WEIGHTS_NAME).stat().st_size).zero_()
                folder = copies[i % COPIES]
                if kind.startswith("sealed"):
                    folder = Path(f"{folder}-sealed")
                began = time.perf_counter()
                read_adapter(folder, base, limits, scratch=scratch, keys=keys)
                times.append((time.perf_counter() - began) * 1e3)
        took_ms |= large_file(Path(temporary), keys, arguments.reads)
    for kind, times in took_ms.items():
        line = {
            "bench": "adapter_reads",
            "case": kind,
            "file_bytes": LARGE_BYTES if "large" in kind else (adapter / WEIGHTS_NAME).stat().st_size,
            "reads": len(times),
            "p50_ms": round(statistics.median(times), 3),
            "p95_ms": round(statistics.quantiles(times, n=20)[-1], 3),
            "model": name,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        print(json.dumps(line) if arguments.json else f"{kind:24} {line['p50_ms']:8.2f} / {line['p95_ms']:.2f} ms")


if __name__ == "__main__":
    main()
