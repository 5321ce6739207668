"""The worker's settings. Parsed once, in `__main__`; never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from manylora_shared.encryption.settings import SealingSettings
from manylora_shared.ids import DEFAULT_POOL, name_problem
from manylora_shared.process.config import ConfigError, setting
from manylora_shared.process.cores import num_cores

PARKED_SEQUENCES = 64
AUTO_DEVICE = "auto"  # until the engine is built, which settles it
_MIB = 1 << 20
_BY_DEVICE = -1.0
_GPU_HOST_KV_MB = 4096
_FRAMES_PER_CORE = 125
_MAX_FRAMES = 1000


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(SealingSettings):
    """A manylora worker: one base model on one device, many adapters."""

    worker_id: str = setting("", "this worker's name; empty: one is drawn")
    pool: str = setting(DEFAULT_POOL, "the pool that it joins: workers that compute the same, under one name")
    drain_s: float = setting(5.0, "how long running requests may go on after a SIGTERM", at_least=0)

    model: str = setting("", "Hugging Face folder of the base model, or its cached hub id")
    model_name: str = setting("", "what it is served as; empty: the last part of model")
    model_alias: str = setting(
        "", "further names under which adapters may know the base model, with commas; the same on all workers"
    )
    draft_model: str = setting(
        "",
        "Hugging Face folder, or cached hub id, of a small model with the same tokens, which guesses for classes whose "
        "policy says `speculation: draft`; empty: none",
    )
    device: str = setting(AUTO_DEVICE, "cpu, cuda, cuda:1, ...; auto: cuda where torch sees one, else cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "compute type; auto: float32 on the CPU, bfloat16 on any other device"
    )
    quantization: Literal["none", "nf4", "fp8", "int4"] = setting("none", "of the base model's weights")
    stall_s: float = setting(
        10.0,
        "an engine that does not go on with its work for so long, and for four times its longest step, has failed, and "
        "the worker ends; 0: it may take any time",
        at_least=0,
    )
    tensor_parallel: int = setting(
        1,
        "processes that share the model, each with a GPU: the first ones, or those from --device on",
        at_least=1,
    )
    threads: int = setting(0, "compute threads on the CPU; 0: one for each core but one", at_least=0)

    max_model_len: int = setting(
        0,
        "no context has more tokens; adapters that rotate positions in their own way may have longer ones than the "
        "model up to it; above a longrope model's original context: its long factors for all; 0: the model's",
        at_least=0,
    )

    kv_cache_mb: int = setting(
        0,
        "MiB of KV cache, unless num_blocks is set; 0: 512, on a GPU all that its memory has left",
        at_least=0,
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto", "of an element of keys and values; auto: --dtype; fp8: a byte (e4m3), a power of two of scale a layer"
    )
    num_blocks: int = setting(0, "KV blocks; 0: as many as kv_cache_mb holds", at_least=0)
    block_size: int = setting(16, "tokens a KV block", at_least=1)
    prefix_cache_share: float = setting(
        0.25, "part of the KV blocks that may keep one tenant's prefixes; 0: no prefix cache", at_least=0
    )
    debug_fill_freed: bool = setting(
        False, "fill blocks with NaN when they are freed: an answer computed from one fails; for debugging"
    )
    host_kv_mb: float = setting(
        _BY_DEVICE, "MiB of host memory for KV of preempted sequences; 0: none; -1: 4096 on a GPU, else none"
    )
    sequence_slots: int = setting(64, "sequences that run at the same time", at_least=1)
    max_batch_tokens: int = setting(512, "tokens a step; at least sequence_slots")
    prefill_chunk_tokens: int = setting(256, "prompt tokens of one sequence in a step", at_least=1)
    target_step_ms: float = setting(
        50.0,
        "how long a step should take while a standard request runs or waits: no more prompt tokens in it than that "
        "allows; 0: any time",
        at_least=0,
    )
    interactive_step_ms: float = setting(
        25.0, "the same while an interactive request runs or waits; the least of those that do counts", at_least=0
    )
    batch_step_ms: float = setting(100.0, "the same while a batch request runs or waits", at_least=0)

    adapter_store: str = setting("adapters", "the cluster's adapter store: a folder, or s3://BUCKET/PREFIX")
    adapter_store_access: str = setting(
        "", "YAML file with endpoint, region and credentials of a store in a bucket; empty: AWS_* of the environment"
    )
    adapter_cache: Path = field(
        default=Path("adapter-cache"), metadata={"help": "folder on this machine's disk for adapters of a bucket"}
    )
    adapter_cache_mb: int = setting(10240, "MiB that it may hold", at_least=1)
    host_adapter_mb: float = setting(1024.0, "MiB of adapters in host memory", above=0)
    device_adapter_mb: float = setting(512.0, "MiB of adapters on the device", above=0)
    device_adapter_min_mb: float = setting(
        _BY_DEVICE, "MiB that adapters keep of a GPU's arena while KV is short and they idle; -1: all of the above"
    )
    device_adapter_max_mb: float = setting(
        _BY_DEVICE,
        "MiB that they may have of it while KV leaves some, half of KV's at most; -1: no more than the above",
    )
    prefetch: bool = setting(True, "adapters are loaded to the host that a tenant is likely to ask for next")
    warm_up_s: float = setting(
        10.0, "how long a new worker may load the cluster's most used adapters before it takes requests", at_least=0
    )
    max_lora_rank: int = setting(64, "the greatest rank of an adapter", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if problem := name_problem(self.pool):
            raise ConfigError(f"--pool: {problem}")
        if not self.model:
            raise ConfigError("--model: must be set")
        if self.max_batch_tokens < self.sequence_slots:
            raise ConfigError(f"--max-batch-tokens: must be at least --sequence-slots, {self.sequence_slots}")
        if self.prefix_cache_share > 1:
            raise ConfigError("--prefix-cache-share: must be 0 to 1")
        home, least, most = self.device_adapter_mb, self.device_adapter_min_mb, self.device_adapter_max_mb
        if least != _BY_DEVICE and not 0 < least <= home:
            raise ConfigError(f"--device-adapter-min-mb: must be above 0 and at most --device-adapter-mb, {home:g}")
        if most != _BY_DEVICE and most < home:
            raise ConfigError(f"--device-adapter-max-mb: must be at least --device-adapter-mb, {home:g}")
        if self.host_kv_mb < 0 and self.host_kv_mb != _BY_DEVICE:
            raise ConfigError("--host-kv-mb: must be at least 0, or -1")

    @property
    def model_aliases(self) -> tuple[str, ...]:
        return tuple(name for each in self.model_alias.split(",") if (name := each.strip()))

    @property
    def host_adapter_bytes(self) -> int:
        return round(self.host_adapter_mb * _MIB)

    @property
    def device_adapter_bytes(self) -> int:
        return round(self.device_adapter_mb * _MIB)

    @property
    def arena_adapter_bytes(self) -> tuple[int, int]:
        """Least and most that adapters may have of a GPU's arena."""
        home = self.device_adapter_mb
        least = home if self.device_adapter_min_mb == _BY_DEVICE else self.device_adapter_min_mb
        most = home if self.device_adapter_max_mb == _BY_DEVICE else self.device_adapter_max_mb
        return round(least * _MIB), round(most * _MIB)

    @property
    def compute_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self._is_gpu else "float32"

    @property
    def compute_threads(self) -> int:
        # The event loop, and what else runs on the machine, have a core left.
        return self.threads or max(1, num_cores() - 1)

    @property
    def parked_sequences(self) -> int:
        """Beyond the slots, for flows that are behind."""
        return PARKED_SEQUENCES

    @property
    def frames_per_s(self) -> int:
        """Over all streams. By the cores, for router and callers may be on them too."""
        return min(_FRAMES_PER_CORE * num_cores(), _MAX_FRAMES)

    @property
    def host_kv_bytes(self) -> int:
        # On the CPU the KV is in host memory: what swaps took would be missing there.
        if self.host_kv_mb != _BY_DEVICE:
            return round(self.host_kv_mb * _MIB)
        return _GPU_HOST_KV_MB * _MIB if self._is_gpu else 0

    @property
    def _is_gpu(self) -> bool:
        return self.device not in ("cpu", AUTO_DEVICE)
