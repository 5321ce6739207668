"""Puts the torch half of a worker together: the model, its KV cache, its runner and its adapter backend.

Owns nothing: the parts are handed to the caller, who closes the backend. Importing this module imports torch; the rest
of the worker does so only through it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manylora_worker.kinds.api import ModelRunner
from manylora_worker.models.decoder_weights import DecoderWeights
from manylora_worker.models.loader import LoadedModel, ModelRefused, ModelSpec, Quantization, load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.kv_cache import MIB, KvCache
from manylora_worker.models.torch.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.models.torch.packed_linear import PackedLinear
from manylora_worker.weights.adapter_check import AdapterReport
from manylora_worker.weights.backend import TorchAdapterBackend
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.layout import Layout, elements_of
from manylora_worker.weights.reader import AdapterReader, LocalReader
from manylora_worker.weights.reader_pool import ReaderProcesses
from manylora_worker.weights.source import AdapterBase, AdapterLimits

if TYPE_CHECKING:
    from manylora_worker.models.cuda.runner import DeviceModelRunner

_LOG = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LORA_COSTS = {"cpu": LoraCosts(product=2e5, copied_weight=40.0), "cuda": LoraCosts(product=2e9, copied_weight=2e3)}
"""By device type: about 4 us a product on either; 10 GB/s copied on the one, 2 TB/s on the other."""
DEFAULT_KV_CACHE_MB = 512
GIB = 1 << 30
_MARGIN_DIVISOR = 50
"""Part of the device's memory that nobody plans with."""
_MAX_READERS = 8
_OTHER_CORES = 2
"""For the engine's thread and the event loop: readers take the rest, where there are so many."""
_STACKED_ADAPTER_BYTES = 256 * MIB
"""Bound on the copies that stack the adapters of a step, see LoraPlanner."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engine needs to know, as plain values.

    Attributes:
        model: a folder, or a hub id in the local cache; `model_name` is what it is served as (default: its last part).
        dtype: "float32", "bfloat16" or "float16".
        num_blocks: KV blocks; 0: as many as fit in `kv_cache_mb` MiB; is that 0 too, as fit in DEFAULT_KV_CACHE_MB MiB,
            or on a GPU in what its memory has left.
        adapter_store: the folder above `objects/`.
        marks_free: see KvCache.
        host_kv_bytes: host memory for the KV of swapped sequences; of it whole blocks are taken.
    """

    model: str
    adapter_store: Path
    model_name: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    quantization: Quantization = "none"
    kv_cache_mb: int = 0
    num_blocks: int = 0
    block_size: int = 16
    max_lora_rank: int = 64
    device_adapter_bytes: int = 512 * MIB
    host_adapter_bytes: int = 1024 * MIB
    host_kv_bytes: int = 0
    sequence_slots: int = 64
    max_batch_tokens: int = 512
    threads: int = 1
    marks_free: bool = False


@dataclass(frozen=True)
class EngineParts:
    runner: ModelRunner
    backend: TorchAdapterBackend
    spec: ModelSpec
    kv_block_bytes: int
    validate: Callable[[Path], AdapterReport]
    """Reads the adapter in a folder as a load would, keeps nothing. Raises AdapterInvalid. May run on any thread."""


def build_engine_parts(options: EngineOptions, *, notify: Callable[[], None] = lambda: None) -> EngineParts:
    """Loads the model and allocates the cache.

    Args:
        notify: see TorchAdapterBackend.

    Raises:
        ModelRefused: the model cannot be served with these options.
    """
    if options.dtype not in _DTYPES:
        raise ModelRefused(f"dtype {options.dtype!r} is none of {', '.join(_DTYPES)}")
    loaded = load_model(
        options.model,
        name=options.model_name,
        dtype=_DTYPES[options.dtype],
        device=options.device,
        quantization=options.quantization,
        threads=options.threads,
    )
    weights = trusted_weights(loaded)
    device_runner = None
    if loaded.device.type == "cuda" and weights is not None:
        device_runner = _device_runner(loaded, weights, options)
    runner = device_runner or _reference_runner(loaded, weights, options)
    base = loaded.adapter_base()
    reader = _reader(base, options, is_gpu=loaded.device.type == "cuda")
    backend = TorchAdapterBackend(
        options.adapter_store / "objects",
        reader,
        runner,
        host_threads=_num_readers() if loaded.device.type == "cuda" else 1,
        notify=notify,
    )
    if device_runner is not None:
        _warm_up(device_runner, loaded.device)
    return EngineParts(
        runner=runner,
        backend=backend,
        spec=loaded.spec,
        kv_block_bytes=loaded.spec.kv.token_bytes(loaded.dtype) * options.block_size,
        validate=lambda folder: _report(reader.check(folder), base),
    )


def _reader(base: AdapterBase, options: EngineOptions, *, is_gpu: bool) -> AdapterReader:
    """Beside a GPU, processes: there the engine's thread launches kernels, and waits for every other Python thread."""
    limits = AdapterLimits(max_rank=options.max_lora_rank)
    if not is_gpu:
        return LocalReader(base, limits)
    return ReaderProcesses(base, limits, HostMemory(options.host_adapter_bytes))


def _num_readers() -> int:
    return max(1, min(_MAX_READERS, len(os.sched_getaffinity(0)) - _OTHER_CORES))


def _reference_runner(loaded: LoadedModel, weights: DecoderWeights | None, options: EngineOptions) -> TorchModelRunner:
    """The runner for the CPU, and on a GPU for a model whose layers the device decoder does not know."""
    planner = LoraPlanner(
        _LORA_COSTS.get(loaded.device.type, _LORA_COSTS["cuda"]),
        max_stacked_weights=_STACKED_ADAPTER_BYTES // loaded.dtype.itemsize,
    )
    if weights is None:
        _LOG.warning("%s has parts that our decoders do not know: it runs slowly", loaded.spec.model_type)
    return TorchModelRunner(
        loaded, weights, _build_cache(loaded, options), planner, num_host_blocks=_host_blocks(loaded, options)
    )


def _host_blocks(loaded: LoadedModel, options: EngineOptions) -> int:
    return loaded.spec.kv.blocks_in(options.host_kv_bytes, options.block_size, loaded.dtype)


def _device_runner(loaded: LoadedModel, weights: DecoderWeights, options: EngineOptions) -> DeviceModelRunner:
    """The runner of fused kernels and CUDA graphs."""
    from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner, activation_bytes

    block_bytes = loaded.spec.kv.token_bytes(loaded.dtype) * options.block_size
    adapter_blocks = options.device_adapter_bytes // block_bytes
    if adapter_blocks < 1:
        raise ModelRefused(f"device_adapter_mb: holds no block of {block_bytes} bytes")
    limits = DeviceLimits(
        max_rows=options.max_batch_tokens,
        max_sequences=options.sequence_slots,
        adapter_slots=adapter_blocks,
        max_rank=options.max_lora_rank,
    )
    if not (options.num_blocks or options.kv_cache_mb):
        num_blocks = (
            _blocks_left(loaded.device, activation_bytes(loaded, weights, limits), block_bytes) - adapter_blocks
        )
        options = replace(options, num_blocks=max(0, num_blocks))
        if num_blocks < 1:
            raise ModelRefused(f"device_adapter_mb: {adapter_blocks} blocks of adapters leave none for KV")
    cache = _build_cache(loaded, options, more_blocks=adapter_blocks)
    return DeviceModelRunner(
        loaded,
        weights,
        cache,
        limits,
        num_kv_blocks=cache.num_blocks - adapter_blocks,
        num_host_blocks=_host_blocks(loaded, options),
    )


def _blocks_left(device: torch.device, reserved_bytes: int, block_bytes: int) -> int:
    """Blocks that the device has room for, beside what a step needs."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    margin_bytes = total_bytes // _MARGIN_DIVISOR
    _LOG.info(
        "device memory: %.1f of %.1f GiB are free; %.1f are kept for steps and %.1f as a margin",
        free_bytes / GIB, total_bytes / GIB, reserved_bytes / GIB, margin_bytes / GIB,
    )  # fmt: skip
    return max(0, free_bytes - reserved_bytes - margin_bytes) // block_bytes


def _warm_up(runner: DeviceModelRunner, device: torch.device) -> None:
    before_bytes, _ = torch.cuda.mem_get_info(device)
    started = time.monotonic()
    num_graphs = runner.warm_up()
    after_bytes, _ = torch.cuda.mem_get_info(device)
    _LOG.info(
        "warmed up in %.1f s: %d graphs, %.1f GiB; %.1f GiB of device memory are left",
        time.monotonic() - started, num_graphs, (before_bytes - after_bytes) / GIB, after_bytes / GIB,
    )  # fmt: skip


def _report(layout: Layout, base: AdapterBase) -> AdapterReport:
    targets = [
        (stop - start, base.sites[placed.site].slots[slot].path)
        for placed in layout
        for slot, start, stop, _ in placed.slots
    ]
    return AdapterReport(
        max_lora_rank=max(rank for rank, _ in targets),
        size_bytes=elements_of(layout) * base.dtype.itemsize,
        target_modules=tuple(sorted({path.rpartition(".")[2] for _, path in targets})),
    )


def _build_cache(loaded: LoadedModel, options: EngineOptions, *, more_blocks: int = 0) -> KvCache:
    """more_blocks: beside those for KV, for adapters."""
    kv = loaded.spec.kv
    kv_cache_mb = options.kv_cache_mb or DEFAULT_KV_CACHE_MB
    num_blocks = options.num_blocks or kv.blocks_in(kv_cache_mb * MIB, options.block_size, loaded.dtype)
    if num_blocks < 1:
        raise ModelRefused(f"kv_cache_mb: {kv_cache_mb} MiB hold no block of {options.block_size} tokens")
    cache = KvCache(
        kv,
        num_blocks=num_blocks + more_blocks,
        block_size=options.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        marks_free=options.marks_free,
    )
    weight_bytes = sum(p.nbytes for p in loaded.model.parameters())
    weight_bytes += sum(m.weight_bytes for m in loaded.model.modules() if isinstance(m, PackedLinear))
    _LOG.info(
        "model %s (%s, %s, %s): %.1f MiB of weights, %d linear layers in %d products; "
        "KV cache and adapters %.1f MiB: %d + %d blocks of %d tokens, %d bytes a token",
        loaded.spec.name,
        loaded.spec.model_type,
        options.dtype,
        options.quantization,
        weight_bytes / MIB,
        len(loaded.spec.modules),
        len(loaded.sites),
        cache.size_bytes / MIB,
        num_blocks,
        more_blocks,
        options.block_size,
        kv.token_bytes(loaded.dtype),
    )
    return cache
