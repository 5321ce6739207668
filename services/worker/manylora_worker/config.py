"""The worker's settings: one frozen dataclass, parsed once in `__main__`. Values are passed on, never the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from manylora_shared.process.config import ConfigError, check_listen
from manylora_shared.process.cores import num_cores

_ANY_HOST = ("0.0.0.0", "[::]", "::", "")


@dataclass(frozen=True)
class WorkerConfig:
    """A manylora worker: one base model on one device, many adapters."""

    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port to serve on; port 0: any free one"})
    advertise: str = field(default="", metadata={"help": "host:port that others dial; empty: the bound one"})
    etcd: str = field(default="127.0.0.1:2379", metadata={"help": "etcd's endpoints, comma-separated host:port"})
    lease_ttl_s: int = field(default=2, metadata={"help": "how long others take a silent worker for alive"})
    worker_id: str = field(default="", metadata={"help": "this worker's name; empty: drawn"})
    drain_s: float = field(default=5.0, metadata={"help": "how long running requests may go on after a SIGTERM"})

    model: str = field(default="", metadata={"help": "Hugging Face folder of the base model, or its cached hub id"})
    model_name: str = field(default="", metadata={"help": "what it is served as; empty: the last part of model"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, cuda:1, ..."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "compute type; auto: float32 on the CPU, bfloat16 on any other device"}
    )
    quantization: Literal["none", "nf4"] = field(default="none", metadata={"help": "of the base model's weights"})
    threads: int = field(default=0, metadata={"help": "compute threads on the CPU; 0: one for each core but one"})

    kv_cache_mb: int = field(
        default=0,
        metadata={"help": "MiB of KV cache, unless num_blocks is set; 0: 512, on a GPU all that its memory has left"},
    )
    num_blocks: int = field(default=0, metadata={"help": "KV blocks; 0: as many as kv_cache_mb holds"})
    block_size: int = field(default=16, metadata={"help": "tokens a KV block"})
    prefix_cache_share: float = field(
        default=0.25, metadata={"help": "part of the KV blocks that may keep one tenant's prefixes; 0: no prefix cache"}
    )
    public_prefix_share: float = field(
        default=0.1,
        metadata={"help": "part of the KV blocks that public prefixes may hold; 0, or without a prefix cache: none"},
    )
    debug_fill_freed: bool = field(
        default=False,
        metadata={"help": "fill blocks with NaN when they are freed: an answer computed from one fails; for debugging"},
    )
    host_kv_mb: float = field(
        default=-1.0,
        metadata={"help": "MiB of host memory for KV of preempted sequences; 0: none; -1: 4096 on a GPU, else none"},
    )
    sequence_slots: int = field(default=64, metadata={"help": "sequences that run at the same time"})
    max_batch_tokens: int = field(default=512, metadata={"help": "tokens a step; at least sequence_slots"})
    prefill_chunk_tokens: int = field(default=256, metadata={"help": "prompt tokens of one sequence in a step"})
    target_step_ms: float = field(
        default=50.0,
        metadata={"help": "how long a step should take: no more prompt tokens in it than that allows; 0: any time"},
    )

    adapter_store: Path = field(default=Path("adapters"), metadata={"help": "the cluster's adapter store"})
    host_adapter_mb: float = field(default=1024.0, metadata={"help": "MiB of adapters in host memory"})
    device_adapter_mb: float = field(default=512.0, metadata={"help": "MiB of adapters on the device"})
    max_lora_rank: int = field(default=64, metadata={"help": "the greatest rank of an adapter"})

    log_level: Literal["debug", "info", "warning", "error"] = field(default="info", metadata={"help": "on stderr"})
    otlp_endpoint: str = field(default="", metadata={"help": "OTLP gRPC receiver of traces, host:port"})
    trace_file: str = field(default="", metadata={"help": "file to append traces to, one JSON object a line"})

    def __post_init__(self) -> None:
        check_listen(self.listen)
        if self.listen.rpartition(":")[0] in _ANY_HOST and not self.advertise:
            raise ConfigError(f"--advertise: must be set, for nobody can dial {self.listen}")
        if not self.model:
            raise ConfigError("--model: must be set")
        if self.max_batch_tokens < self.sequence_slots:
            raise ConfigError(f"--max-batch-tokens: must be at least --sequence-slots, {self.sequence_slots}")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must be greater than 0")
        if not 0 <= self.prefix_cache_share <= 1:
            raise ConfigError("--prefix-cache-share: must be 0 to 1")
        if not 0 <= self.public_prefix_share <= 1:
            raise ConfigError("--public-prefix-share: must be 0 to 1")
        if self.host_kv_mb < 0 and self.host_kv_mb != _BY_DEVICE:
            raise ConfigError("--host-kv-mb: must be at least 0, or -1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must not be negative")

    @property
    def host_adapter_bytes(self) -> int:
        return round(self.host_adapter_mb * _MIB)

    @property
    def device_adapter_bytes(self) -> int:
        return round(self.device_adapter_mb * _MIB)

    @property
    def compute_dtype(self) -> str:
        """`dtype` with auto resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def compute_threads(self) -> int:
        """`threads` resolved: the event loop, and what else runs on the machine, have a core left."""
        return self.threads or max(1, num_cores() - 1)

    @property
    def parked_sequences(self) -> int:
        """Sequences beyond the slots that it takes for flows that are behind."""
        return PARKED_SEQUENCES

    @property
    def frames_per_s(self) -> int:
        """Frames it sends over all streams: by the cores, as long as router and callers may be on them too."""
        return min(_FRAMES_PER_CORE * num_cores(), _MAX_FRAMES)

    @property
    def host_kv_bytes(self) -> int:
        """`host_kv_mb` resolved. On the CPU the KV is in host memory: what swaps took would be missing there."""
        if self.host_kv_mb != _BY_DEVICE:
            return round(self.host_kv_mb * _MIB)
        return 0 if self.device == "cpu" else _GPU_HOST_KV_MB * _MIB


_MIB = 1 << 20
_BY_DEVICE = -1.0
_GPU_HOST_KV_MB = 4096
PARKED_SEQUENCES = 64
_FRAMES_PER_CORE = 125
_MAX_FRAMES = 1000


_AT_LEAST_ONE = (
    "lease_ttl_s",
    "block_size",
    "sequence_slots",
    "prefill_chunk_tokens",
    "max_lora_rank",
)
_POSITIVE = ("host_adapter_mb", "device_adapter_mb")
_NOT_NEGATIVE = (
    "kv_cache_mb",
    "num_blocks",
    "threads",
    "target_step_ms",
    "drain_s",
)
