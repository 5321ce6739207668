"""The router's settings. Parsed once, in `__main__`; never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.process.config import ConfigError, check_listen


@dataclass(frozen=True)
class RouterConfig:
    """Router: the public face of a manylora cluster."""

    adapter_store: str = field(metadata={"help": "folder of the adapter store, shared with the workers"})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port to serve on; port 0 picks a free one"})
    advertise: str = field(default="", metadata={"help": "host:port that others dial; empty: the bound address"})
    etcd: str = field(default="127.0.0.1:2379", metadata={"help": "etcd's endpoints, comma-separated host:port"})
    router_id: str = field(default="", metadata={"help": "this router's name; empty: one is drawn"})
    model: str = field(
        default="",
        metadata={"help": "base model's folder or cached hub id, for its tokenizer; empty: token ids only"},
    )
    default_max_tokens: int = field(default=128, metadata={"help": "output tokens of a request that names no limit"})
    max_adapter_mb: int = field(default=4096, metadata={"help": "largest weight file that an adapter may have, in MiB"})
    tokenizer_threads: int = field(default=2, metadata={"help": "prompts that are tokenized at a time"})
    lease_ttl_s: int = field(default=2, metadata={"help": "seconds after which a dead router leaves the cluster"})
    operator_key_file: str = field(
        default="", metadata={"help": "file with an operator's key, made where there is none; empty: none"}
    )
    otlp_endpoint: str = field(default="", metadata={"help": "OTLP receiver of traces, host:port; empty: none"})
    trace_file: str = field(default="", metadata={"help": "file to append spans to, one JSON object a line"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})

    def __post_init__(self) -> None:
        check_listen(self.listen)
        if not self.adapter_store:
            raise ConfigError("--adapter-store: must name a folder")
        for name, low in (
            ("default_max_tokens", 1),
            ("max_adapter_mb", 1),
            ("tokenizer_threads", 1),
            ("lease_ttl_s", 2),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}")
