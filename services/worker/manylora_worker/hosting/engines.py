"""Which engine a worker runs: the real one (torch) or the fake one (no model). Puts its parts together.

Owns nothing. torch is imported only where it is chosen, so a fake worker starts in a moment.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manylora_shared.process.cores import num_cores
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner

from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.hosting.runtime import ModelInfo, Runtime, ThreadRuntime
from manylora_worker.kinds.api import AdapterBackend, ModelRunner, StepBatch
from manylora_worker.memory.prefix_cache import SECRET_BYTES, PrefixKeys, PrefixOptions
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.weights.adapter_check import AdapterReport, AdapterValidator, FakeValidator, ThreadValidator

_MIB = 1 << 20
_REQUESTS_PER_SLOT = 4
"""Bound of requests in the worker: running, waiting for a slot, or for their adapter. Never below what it announces."""
_OVERTAKES_PER_SLOT = 2
"""Requests that may overtake one whose adapter finds no room: fewer leave slots empty while pins run out."""
_FAKE_TOKEN_BYTES = 1 << 17
"""KV of a token in a model of 8 billion parameters."""
FAKE_MODEL = ModelInfo(
    name="fake",
    digest="fake",
    device="none",
    vocab_size=259,
    max_context_tokens=32768,
    eos_token_ids=(),
    kv_block_bytes=16 * _FAKE_TOKEN_BYTES,
)
"""As many tokens as the demo model's tokenizer has; no token ends a text. `kv_block_bytes` follows the block size."""
_FAKE_BLOCKS = 8192


def engine_limits(config: WorkerConfig) -> EngineLimits:
    return EngineLimits(
        planner=PlannerLimits(
            max_batch_tokens=config.max_batch_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            sequence_slots=config.sequence_slots,
            target_step_s=config.target_step_ms / 1e3 or None,
        ),
        adapters=AdapterCacheLimits(
            host_bytes=round(config.host_adapter_mb * _MIB),
            device_bytes=config.device_adapter_bytes,
            max_overtakes=_OVERTAKES_PER_SLOT * config.sequence_slots,
        ),
        max_requests=max(_REQUESTS_PER_SLOT * config.sequence_slots, config.sequence_slots + config.parked_sequences),
    )


def prefix_options(config: WorkerConfig, model: ModelInfo, secret: bytes) -> PrefixOptions | None:
    """The prefix cache as it is configured; None: there is none."""
    if config.prefix_cache_share == 0:
        return None
    return PrefixOptions(PrefixKeys(secret, model.digest), config.prefix_cache_share, config.public_prefix_share)


@dataclass(frozen=True)
class Engine:
    """What is turned, in whichever process."""

    core: EngineCore
    backend: AdapterBackend
    model: ModelInfo
    max_context_tokens: int
    """Of the base model, whatever the KV blocks hold: see RequestBounds."""
    max_requests: int
    check: Callable[[Path], AdapterReport] | None
    """Reads the adapter in a folder as a load would; see EngineParts.validate. None: it is the fake engine."""


def build(config: WorkerConfig) -> tuple[Runtime, AdapterValidator]:
    """The engine and what checks its adapters. May take as long as a model takes to load.

    Raises:
        ValueError: the model cannot be served with this configuration; the message says why.
        OSError: the engine's process could not be started.
    """
    if config.has_engine_process:
        from manylora_worker.hosting.process import start_engine

        runtime = start_engine(config)
        return runtime, _validator(config, runtime.check_adapter)
    waker = _Waker()
    engine = build_engine(config, waker)
    thread = ThreadRuntime(engine.core, engine.backend, engine.model, max_requests=engine.max_requests)
    waker.wake = thread.wake
    return thread, _validator(config, engine.check)


def build_engine(config: WorkerConfig, notify: Callable[[], None]) -> Engine:
    """
    Args:
        notify: called from any thread when the backend has news.

    Raises:
        ValueError: the model cannot be served with this configuration; the message says why.
    """
    return _build_fake(config) if config.engine == "fake" else _build_torch(config, notify)


def _validator(config: WorkerConfig, check: Callable[[Path], AdapterReport] | None) -> AdapterValidator:
    if config.engine == "fake":
        return FakeValidator()
    assert check is not None, "a model's engine has one"
    return ThreadValidator(config.adapter_store, check)


def _build_torch(config: WorkerConfig, notify: Callable[[], None]) -> Engine:
    from manylora_worker.models import build as engine_factory
    from manylora_worker.models.loader import ModelRefused

    options = engine_factory.EngineOptions(
        model=config.model,
        adapter_store=config.adapter_store,
        model_name=config.model_name,
        device=config.device,
        dtype=config.compute_dtype,
        quantization=config.quantization,
        kv_cache_mb=config.kv_cache_mb,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_lora_rank=config.max_lora_rank,
        device_adapter_bytes=config.device_adapter_bytes,
        host_adapter_bytes=round(config.host_adapter_mb * _MIB),
        host_kv_bytes=config.host_kv_bytes,
        sequence_slots=config.sequence_slots,
        max_batch_tokens=config.max_batch_tokens,
        threads=config.threads or max(1, num_cores() - 1),
        marks_free=config.debug_fill_freed,
    )
    try:
        parts = engine_factory.build_engine_parts(options, notify=notify)
    except ModelRefused as refusal:
        raise ValueError(str(refusal)) from refusal
    model = ModelInfo(
        name=parts.spec.name,
        digest=parts.spec.digest,
        device=config.device,
        vocab_size=parts.spec.vocab_size,
        max_context_tokens=parts.spec.max_context_tokens,
        eos_token_ids=parts.spec.eos_token_ids,
        kv_block_bytes=parts.kv_block_bytes,
    )
    return _engine(config, parts.runner, parts.backend, model, parts.validate)


def _build_fake(config: WorkerConfig) -> Engine:
    runner = FakeRunner(
        num_blocks=config.num_blocks or _FAKE_BLOCKS,
        block_size=config.block_size,
        vocab_size=FAKE_MODEL.vocab_size,
        max_context_tokens=FAKE_MODEL.max_context_tokens,
        pace=_Pacer(config.fake_step_ms / 1e3),
        num_host_blocks=config.host_kv_bytes // (config.block_size * _FAKE_TOKEN_BYTES),
    )
    backend = FakeAdapterBackend(time.monotonic, size_bytes=lambda uid: _MIB)
    model = dataclasses.replace(FAKE_MODEL, kv_block_bytes=config.block_size * _FAKE_TOKEN_BYTES)
    return _engine(config, runner, backend, model, None)


def _engine(
    config: WorkerConfig,
    runner: ModelRunner,
    backend: AdapterBackend,
    model: ModelInfo,
    check: Callable[[Path], AdapterReport] | None,
) -> Engine:
    limits = engine_limits(config)
    capacity_tokens = runner.num_blocks * runner.block_size
    model = dataclasses.replace(model, max_context_tokens=min(model.max_context_tokens, capacity_tokens))
    prefix = prefix_options(config, model, secrets.token_bytes(SECRET_BYTES))
    core = EngineCore(runner, backend, limits, prefix, clears_freed=config.debug_fill_freed)
    return Engine(core, backend, model, runner.max_context_tokens, limits.max_requests, check)


class _Waker:
    """Hands the backend's notices to the runtime, which is made after it."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.wake is not None:
            self.wake()


class _Pacer:
    """Ends each step `step_s` after the one before it ended, as long as steps follow one another."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ended_at = 0.0

    def __call__(self, batch: StepBatch) -> None:
        now = time.monotonic()
        began = self._ended_at if now - self._ended_at < self._step_s else now
        time.sleep(max(0.0, began + self._step_s - now))
        self._ended_at = began + self._step_s
