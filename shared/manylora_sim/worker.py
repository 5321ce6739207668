"""`python -m manylora_sim.worker`: a worker as it is, whose model is a fake one; no torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from manylora_shared.process.config import setting
from manylora_worker.__main__ import run
from manylora_worker.config import PARKED_SEQUENCES, WorkerConfig
from manylora_worker.kinds.api import StepBatch
from manylora_worker.models.parts import EngineParts, ModelInfo

from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, FakeValidator

_VOCAB_SIZE = 259  # the demo model's tokenizer's; no token ends a text
_MAX_CONTEXT_TOKENS = 32768
_TOKEN_BYTES = 1 << 17  # KV of a token in a model of 8 billion parameters
_ADAPTER_BYTES = 1 << 20
_BLOCKS = 8192


@dataclass(frozen=True, kw_only=True)
class FakeWorkerConfig(WorkerConfig):
    """A manylora worker without a model, for tests and benchmarks of everything else."""

    model: str = "fake"
    model_name: str = "fake"
    fake_step_ms: float = setting(10.0, "how long a step takes", at_least=0)
    fake_steps: int = setting(0, "it stands still in the step after so many; 0: never", at_least=0)
    parked_sequences: int = setting(PARKED_SEQUENCES, "sequences beyond the slots")
    max_frames_per_s: int = setting(0, "frames it sends a second; 0: a worker's rule")

    @property
    def frames_per_s(self) -> int:
        return self.max_frames_per_s or super().frames_per_s


class _Pacer:
    """Ends each step `step_s` after the one before it ended, as long as steps follow one another. The one after
    `steps`, where they are not 0, never ends."""

    def __init__(self, step_s: float, steps: int) -> None:
        self._step_s = step_s
        self._steps_left = steps or math.inf
        self._ended_at = 0.0

    def __call__(self, batch: StepBatch) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            threading.Event().wait()
        now = time.monotonic()
        began = self._ended_at if now - self._ended_at < self._step_s else now
        time.sleep(max(0.0, began + self._step_s - now))
        self._ended_at = began + self._step_s


def build_fake_engine(config: FakeWorkerConfig, notify: Callable[[], None]) -> EngineParts:
    block_bytes = config.block_size * _TOKEN_BYTES
    runner = FakeRunner(
        num_blocks=config.num_blocks or _BLOCKS,
        block_size=config.block_size,
        vocab_size=_VOCAB_SIZE,
        max_context_tokens=_MAX_CONTEXT_TOKENS,
        pace=_Pacer(config.fake_step_ms / 1e3, config.fake_steps),
        num_host_blocks=config.host_kv_bytes // block_bytes,
    )
    model = ModelInfo(
        name="fake",
        digest="fake",
        device="none",
        vocab_size=_VOCAB_SIZE,
        max_context_tokens=_MAX_CONTEXT_TOKENS,
        eos_token_ids=(),
        kv_block_bytes=block_bytes,
    )
    backend = FakeAdapterBackend(time.monotonic, size_bytes=lambda uid: _ADAPTER_BYTES)
    return EngineParts(runner, backend, model, FakeValidator())


if __name__ == "__main__":
    run(FakeWorkerConfig, build_fake_engine)
