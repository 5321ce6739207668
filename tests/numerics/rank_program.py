"""What each of two ranks runs, in step: the device runner over its share of a model, and the logits of a mixed batch.

python -m tests.numerics.rank_program RANK STORE DEVICE MODEL ADAPTER...
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from manylora_worker.models import loader
from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.weights.source import read_adapter

from tests.numerics.driver import LIMITS, Driver, Stream, prompts

ROUNDS = 2  # a prompt, and a token


def run(
    rank: int, store: Path, device: str, model: Path, adapters: list[Path]
) -> Iterator[tuple[list[Stream], torch.Tensor]]:
    """The streams, one with each adapter and two without, and the logits of their next tokens, in each round."""
    loader.can_pack = lambda *_: False  # type: ignore[assignment]
    group = RankGroup(rank, 2, torch.device("cuda", rank) if device == "cuda" else torch.device(device), store)
    try:
        loaded = loader.load_model(str(model), device=str(group.device), group=group)
        weights = read_decoder(loaded)
        assert weights is not None
        cache = KvCache(loaded.spec.kv, num_blocks=900, block_size=16, dtype=loaded.dtype, device=loaded.device)
        limits = DeviceLimits(max_rows=1024, max_sequences=32, adapter_slots=16, max_rank=64)
        runner = DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=300)
        streams = [Stream(prompt) for prompt in prompts(len(adapters) + 2, longest=20)]
        for stream, folder in zip(streams, adapters, strict=False):
            adapter = read_adapter(folder, loaded.adapter_base(), LIMITS)
            runner.reserve_adapter(adapter)
            runner.fill_adapter(adapter)
            stream.adapter_uid = adapter.uid
        driver = Driver(runner)  # type: ignore[arg-type]
        for round_number in range(ROUNDS):
            yield streams, driver.logits(streams)
            for stream in streams:
                stream.output.append(stream.prompt[round_number])
    finally:
        group.close()


@contextmanager
def other_rank(store: Path, device: str, model: Path, adapters: list[Path]) -> Iterator[None]:
    arguments = ["1", str(store), device, str(model), *map(str, adapters)]
    process = subprocess.Popen([sys.executable, "-m", __name__, *arguments])
    try:
        yield
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), list(map(Path, sys.argv[5:]))):
        pass
