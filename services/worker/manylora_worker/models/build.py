"""The torch half of a worker: the model, its KV cache, its runner, its adapters. The rest imports torch through it."""

from __future__ import annotations

import atexit
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import torch
from manylora_shared.composition import RANKS_AT_ONCE
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.encryption.sealing import OpeningKeys
from manylora_shared.encryption.settings import opening_keys
from manylora_shared.errors import ManyloraError
from manylora_shared.ids import AdapterUid
from manylora_shared.ledger.compute import ModelShape
from manylora_shared.process.config import ConfigError
from manylora_shared.process.cores import num_cores
from manylora_shared.stores.access import access_of
from manylora_shared.stores.bucket import Bucket, is_bucket
from manylora_shared.stores.disk_cache import DiskCache
from manylora_shared.stores.model_files import model_folder
from torch import nn

from manylora_worker.config import AUTO_DEVICE, WorkerConfig
from manylora_worker.constraints.compiler import ConstraintCompiler
from manylora_worker.kinds.api import DraftModel, ModelRunner
from manylora_worker.kinds.guessing import MOST_SPECULATING
from manylora_worker.models.checkpoint import ModelRefused, said, sampling_defaults
from manylora_worker.models.decoder.weights import DecoderWeights
from manylora_worker.models.drafts.drafter import Drafter
from manylora_worker.models.drafts.pairs import DraftParts, load_draft
from manylora_worker.models.layers.kv_cache import MIB, KvCache
from manylora_worker.models.layers.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel, ModelSpec, load_model, model_config
from manylora_worker.models.parts import EngineParts, ModelInfo
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.models.ranks.cuts import SHARED_FAMILIES, check_cuts
from manylora_worker.models.ranks.followers import Followers, Order
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.shared import SharedBackend, share
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.models.torch.kv_scales import with_fp8_kv
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.models.vocabulary import read_vocabulary
from manylora_worker.weights.adapter_check import AdapterReport, ThreadValidator
from manylora_worker.weights.backend import TorchAdapterBackend
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.layout import Extras, Layout, elements_with
from manylora_worker.weights.reader import AdapterReader, LocalReader
from manylora_worker.weights.reader_pool import ReaderProcesses
from manylora_worker.weights.source import AdapterBase, AdapterLimits
from manylora_worker.weights.store import AdapterStore, BucketStore, FolderStore

if TYPE_CHECKING:
    from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner

_LOG = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LORA_COSTS = {"cpu": LoraCosts(product=2e5, copied_weight=40.0), "cuda": LoraCosts(product=2e9, copied_weight=2e3)}
"""By device type: about 4 us a product on either; 10 GB/s copied on the one, 2 TB/s on the other."""
DEFAULT_KV_CACHE_MB = 512
GIB = 1 << 30
_MARGIN_DIVISOR = 50  # of the device's memory: nobody plans with it
_MAX_READERS = 8
_OTHER_CORES = 2  # for the engine's thread and the event loop
_OF_CODES = (PackedLinear, QuantizedLinear, QuantizedStack)  # whose weights are no parameters
_STACKED_ADAPTER_BYTES = 256 * MIB  # see LoraPlanner


def on_device(config: WorkerConfig) -> WorkerConfig:
    """The settings with a device in the place of `auto`."""
    if config.device != AUTO_DEVICE:
        return config
    return replace(config, device="cuda" if torch.cuda.is_available() else "cpu")


def build_engine(config: WorkerConfig, notify: Callable[[], None] = lambda: None) -> EngineParts:
    """As EngineBuilder. Raises ModelRefused."""
    config = on_device(config)
    if config.tensor_parallel == 1:
        return build_rank(config, None, notify)
    if config.draft_model:
        raise ModelRefused("--draft-model: not with --tensor-parallel")
    size, devices = config.tensor_parallel, _rank_devices(config)
    check_cuts(model_config(config.model, config.quantization, config.device), size, SHARED_FAMILIES)
    folder = Path(mkdtemp(prefix="manylora-ranks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    orders = [
        Order(replace(config, device=device), rank, folder / "store") for rank, device in enumerate(devices) if rank
    ]
    followers = Followers(orders, notify, ends_process=config.device != "cpu")
    group: RankGroup | None = None
    try:
        group = RankGroup(0, size, torch.device(devices[0]), folder / "store")
        own = build_rank(replace(config, device=devices[0]), group, notify)
        followers.wait_ready()
    except Exception as error:
        followers.close()
        if group is not None:
            group.close()
        raise ModelRefused(followers.lost or said(error)) from error
    assert isinstance(own.backend, TorchAdapterBackend)
    return replace(
        own,
        runner=share(own.runner, followers),
        backend=SharedBackend(own.backend, own.runner, followers, group),
        model=replace(own.model, kv_block_bytes=size * own.model.kv_block_bytes),
    )


def _rank_devices(config: WorkerConfig) -> list[str]:
    """By rank. Raises ModelRefused."""
    size, device = config.tensor_parallel, torch.device(config.device)
    if device.type != "cuda":
        return [config.device] * size
    first, count = device.index or 0, torch.cuda.device_count()
    if first + size > count:
        raise ModelRefused(f"--tensor-parallel {size}: from {config.device} on there are {max(0, count - first)} GPUs")
    return [f"cuda:{first + rank}" for rank in range(size)]


def build_rank(config: WorkerConfig, group: RankGroup | None, notify: Callable[[], None]) -> EngineParts:
    """A rank's parts, or with no group the whole engine's. Raises ModelRefused."""
    _LOG.info("the model runs on %s", config.device)
    loaded = load_model(
        config.model,
        name=config.model_name,
        dtype=_DTYPES[config.compute_dtype],
        device=config.device,
        quantization=config.quantization,
        threads=config.compute_threads,
        group=group,
        max_model_len=config.max_model_len,
    )
    check_against_eager(loaded, _planner(loaded))
    weights = trusted_weights(loaded)
    if config.kv_cache_dtype == "fp8":
        loaded = with_fp8_kv(loaded)
    is_gpu = loaded.device.type == "cuda"
    device_runner = draft = None
    if config.draft_model:
        loaded, draft = load_draft(config.draft_model, config.model, loaded)
    if is_gpu and weights is not None and weights.has_kernels:
        device_runner = _device_runner(loaded, weights, config, draft)
    runner = device_runner or _reference_runner(loaded, weights, config, draft)
    base = loaded.adapter_base(config.model_aliases, is_read=weights is not None)
    keyring = _keyring(config)
    keys = opening_keys(keyring)
    reader = _reader(base, config, keys, is_gpu=is_gpu)
    store = _store(config, keys)
    backend = TorchAdapterBackend(
        store,
        reader,
        runner,
        host_threads=_num_readers() if is_gpu else 1,
        notify=notify,
    )
    if device_runner is not None:
        _warm_up(device_runner, loaded.device)
    spec = loaded.spec
    model = ModelInfo(
        name=spec.name,
        digest=spec.digest,
        device=config.device,
        vocab_size=spec.vocab_size,
        max_context_tokens=spec.max_context_tokens,
        eos_token_ids=spec.eos_token_ids,
        kv_block_bytes=spec.kv.token_bytes(loaded.dtype) * config.block_size,
        dtype=config.compute_dtype + (", KV in fp8" if spec.kv.scales else ""),
        sampling_defaults=sampling_defaults(model_folder(config.model)),
        longest_context_tokens=spec.longest_context_tokens if weights is not None else 0,
        shape=_shape(loaded),
        rotation=spec.rotation,
    )
    validator = ThreadValidator(
        store,
        lambda folder: _report(folder, *reader.check(folder), base, keys),
        backend.lends,
        lambda folder, uid: _largest_update(reader, base, folder, uid),
    )
    constraints = None
    if group is None or group.rank == 0:
        constraints = ConstraintCompiler(lambda: read_vocabulary(config.model, spec), notify)
    return EngineParts(runner, backend, model, validator, constraints, keyring)


def _shape(loaded: LoadedModel) -> ModelShape:
    spec, config = loaded.spec, loaded.model.config.get_text_config()
    return ModelShape(
        layer_parameters=_active_parameters(spec),
        head_parameters=config.hidden_size * spec.vocab_size,
        attention=4 * config.num_attention_heads * sum(place.head_dim for place in spec.kv.places),
    )


def _active_parameters(spec: ModelSpec) -> int:
    """Of the products that one token takes part in: of experts, those that it goes to."""
    whole = sum(rows * columns for rows, columns in spec.modules.values())
    idle = sum(3 * each.width * each.hidden * (each.experts - each.top_k) for each in spec.experts.values())
    return whole - idle


def _keyring(config: WorkerConfig) -> Keyring | None:
    """Raises ModelRefused."""
    try:
        return config.keyring()
    except ConfigError as error:
        raise ModelRefused(str(error)) from error


def _store(config: WorkerConfig, keys: OpeningKeys) -> AdapterStore:
    """Raises ModelRefused where there can be none."""
    if not is_bucket(str(config.adapter_store)):
        return FolderStore(Path(config.adapter_store), keys)
    try:
        bucket = Bucket(config.adapter_store, access_of(config.adapter_store_access))
        return BucketStore(bucket, DiskCache(config.adapter_cache, config.adapter_cache_mb * MIB), keys)
    except (ValueError, OSError) as error:
        raise ModelRefused(f"--adapter-store {config.adapter_store}: {error}") from error


def _reader(base: AdapterBase, config: WorkerConfig, keys: OpeningKeys, *, is_gpu: bool) -> AdapterReader:
    """Beside a GPU, processes: there the engine's thread launches kernels, and waits for every other Python thread."""
    limits = AdapterLimits(max_rank=config.max_lora_rank)
    if not is_gpu:
        return LocalReader(base, limits, keys)
    return ReaderProcesses(base, limits, HostMemory(config.host_adapter_bytes), keys=keys)


def _num_readers() -> int:
    return max(1, min(_MAX_READERS, num_cores() - _OTHER_CORES))


def _reference_runner(
    loaded: LoadedModel, weights: DecoderWeights | None, config: WorkerConfig, draft: DraftParts | None
) -> TorchModelRunner:
    """The runner for the CPU, and on a GPU for a model whose layers the device decoder does not know."""
    if weights is None:
        _LOG.warning("%s has parts that our decoders do not know: it runs slowly", loaded.spec.model_type)
    elif loaded.device.type == "cuda":
        _LOG.warning("%s has parts that our kernels do not compute: it runs by torch's", loaded.spec.model_type)
    cache = _build_cache(loaded, config)
    return TorchModelRunner(
        loaded,
        weights,
        cache,
        _planner(loaded),
        num_host_blocks=_host_blocks(loaded, config),
        drafter=None if draft is None else _drafter(loaded, draft, cache, config),
    )


def _drafter(loaded: LoadedModel, draft: DraftParts, cache: KvCache, config: WorkerConfig) -> Drafter:
    """Its runner is of the same kind as the model's."""
    own, weights, beside = draft.loaded, draft.weights, cache.beside()
    runner: ModelRunner
    if own.device.type == "cuda" and weights is not None and weights.has_kernels:
        from manylora_worker.models.cuda.runner import DeviceModelRunner

        runner = device = DeviceModelRunner(own, weights, beside, draft_limits(config), num_kv_blocks=cache.num_blocks)
        _warm_up(device, own.device)
    else:
        runner = TorchModelRunner(own, weights, beside, _planner(own))
    shapes = [_shape(each) for each in (own, loaded)]
    share = [each.layer_parameters + each.head_parameters for each in shapes]
    return Drafter(runner, DraftModel(share[0] / share[1], own.spec.max_context_tokens), loaded.spec.vocab_size)


def draft_limits(config: WorkerConfig) -> DeviceLimits:
    """Of the draft model's steps. It has no adapters."""
    from manylora_worker.models.cuda.runner import DeviceLimits

    sequences = min(MOST_SPECULATING, config.sequence_slots)
    return DeviceLimits(max_rows=config.max_batch_tokens, max_sequences=sequences, adapter_slots=1, max_rank=16)


def _planner(loaded: LoadedModel) -> LoraPlanner:
    return LoraPlanner(
        _LORA_COSTS.get(loaded.device.type, _LORA_COSTS["cuda"]),
        max_stacked_weights=_STACKED_ADAPTER_BYTES // loaded.dtype.itemsize,
    )


def _host_blocks(loaded: LoadedModel, config: WorkerConfig) -> int:
    return loaded.spec.kv.blocks_in(config.host_kv_bytes, config.block_size, loaded.dtype)


def _device_runner(
    loaded: LoadedModel, weights: DecoderWeights, config: WorkerConfig, draft: DraftParts | None
) -> DeviceModelRunner:
    """The runner of fused kernels and CUDA graphs."""
    from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner, activation_bytes

    block_bytes = loaded.spec.kv.token_bytes(loaded.dtype) * config.block_size
    if loaded.spec.kv.scales:
        _check_block(loaded, config, block_bytes)
    adapter_blocks = config.device_adapter_bytes // block_bytes
    if adapter_blocks < 1:
        raise ModelRefused(f"device_adapter_mb: holds no block of {block_bytes} bytes")
    limits = DeviceLimits(
        max_rows=config.max_batch_tokens,
        max_sequences=config.sequence_slots,
        adapter_slots=max(adapter_blocks, config.arena_adapter_bytes[1] // block_bytes),
        max_rank=config.max_lora_rank,
    )
    if not (config.num_blocks or config.kv_cache_mb):
        reserved_bytes = activation_bytes(loaded, weights, limits, config.block_size)
        if draft is not None and draft.weights is not None:
            reserved_bytes += activation_bytes(draft.loaded, draft.weights, draft_limits(config), config.block_size)
        num_blocks = _blocks_left(loaded.device, reserved_bytes, block_bytes)
        num_blocks = (num_blocks if loaded.group is None else loaded.group.least(num_blocks)) - adapter_blocks
        config = replace(config, num_blocks=max(0, num_blocks))
        if num_blocks < 1:
            raise ModelRefused(f"device_adapter_mb: {adapter_blocks} blocks of adapters leave none for KV")
    cache = _build_cache(loaded, config, more_blocks=adapter_blocks)
    return DeviceModelRunner(
        loaded,
        weights,
        cache,
        limits,
        num_kv_blocks=cache.num_blocks - adapter_blocks,
        num_host_blocks=_host_blocks(loaded, config),
        drafter=None if draft is None else _drafter(loaded, draft, cache, config),
    )


def _check_block(loaded: LoadedModel, config: WorkerConfig, block_bytes: int) -> None:
    """Raises ModelRefused where one in FP8 is less than a whole chunk of an adapter: more chunks cost every step."""
    sites = [site for site in loaded.sites if not site.experts]
    widest = max(width for site in sites for width in (site.in_features, *(s.stop - s.start for s in site.slots)))
    part_bytes = min(RANKS_AT_ONCE, config.max_lora_rank) * widest * loaded.dtype.itemsize
    if part_bytes > block_bytes:
        least = -(-part_bytes * config.block_size // block_bytes)
        raise ModelRefused(
            f"--block-size {config.block_size}: a block of KV in fp8 has {block_bytes} bytes, and a part of an adapter "
            f"up to {part_bytes}: set --block-size {1 << (least - 1).bit_length()}"
        )


def _blocks_left(device: torch.device, reserved_bytes: int, block_bytes: int) -> int:
    """Blocks that the device has room for, beside what a step needs."""
    torch.cuda.empty_cache()  # what loading and fusing left there
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


def _report(folder: Path, layout: Layout, extras: Extras, base: AdapterBase, keys: OpeningKeys) -> AdapterReport:
    coverage = coverage_of(folder, layout, base, extras, keys)
    return AdapterReport(
        max_lora_rank=max(module.rank for module in coverage.modules),
        size_bytes=elements_with(layout, extras) * base.dtype.itemsize,
        target_modules=tuple(sorted({module.path.rpartition(".")[2] for module in coverage.modules})),
        coverage=coverage,
        rope="" if extras.rope is None else extras.rope.text,
        max_context_tokens=0 if extras.rope is None else extras.rope.max_context_tokens,
        goes_alone=bool(extras.vectors or extras.tokens)
        or (not base.composes_experts and any(placed.experts for placed in layout)),
    )


def _largest_update(reader: AdapterReader, base: AdapterBase, folder: Path, uid: AdapterUid) -> str:
    """By the norm of A times that of B, which no entry of their product exceeds."""
    try:
        adapter = reader.read(folder, uid)
    except (ManyloraError, OSError, RuntimeError, ValueError, MemoryError) as error:
        return f"not known ({error})"
    try:
        norms = {
            base.sites[placed.site].slots[slot].path: float(a[start:stop].norm() * b.of(adapter.buffer).double().norm())
            for placed in adapter.layout
            for a in [placed.a.of(adapter.buffer).double()]
            for slot, start, stop, b in placed.slots
        }
    finally:
        reader.free(adapter)
    path = max(norms, key=lambda each: norms[each])
    return f"that of {path}, of norm {norms[path]:.2g} at most"


def weight_bytes(model: nn.Module) -> int:
    own = (each.weight_bytes for each in model.modules() if isinstance(each, _OF_CODES))
    return sum(each.nbytes for each in model.parameters()) + sum(own)


def _build_cache(loaded: LoadedModel, config: WorkerConfig, *, more_blocks: int = 0) -> KvCache:
    """more_blocks: beside those for KV, for adapters."""
    kv = loaded.spec.kv
    kv_cache_mb = config.kv_cache_mb or DEFAULT_KV_CACHE_MB
    num_blocks = config.num_blocks or kv.blocks_in(kv_cache_mb * MIB, config.block_size, loaded.dtype)
    if num_blocks < 1:
        raise ModelRefused(f"kv_cache_mb: {kv_cache_mb} MiB hold no block of {config.block_size} tokens")
    cache = KvCache(
        kv,
        num_blocks=num_blocks + more_blocks,
        block_size=config.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        marks_free=config.debug_fill_freed,
    )
    if num_blocks <= cache.state_blocks:
        raise ModelRefused(
            f"kv_cache_mb: {num_blocks} blocks hold no sequence: its state in recurrent layers takes "
            f"{cache.state_blocks} beside those of its tokens"
        )
    _LOG.info(
        "model %s (%s, %s, %s): %.1f MiB of weights, %d linear layers in %d products; "
        "KV cache and adapters %.1f MiB: %d + %d blocks of %d tokens, %d bytes a token",
        loaded.spec.name,
        loaded.spec.model_type,
        config.compute_dtype,
        config.quantization,
        weight_bytes(loaded.model) / MIB,
        len(loaded.spec.modules),
        len(loaded.sites),
        cache.size_bytes / MIB,
        num_blocks,
        more_blocks,
        config.block_size,
        kv.token_bytes(loaded.dtype),
    )
    return cache
