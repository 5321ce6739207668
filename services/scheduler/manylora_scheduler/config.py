"""The scheduler's settings. Parsed once, in `__main__`; never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.process.config import ConfigError, check_listen


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduler: decides which request runs next, and where. One leads, others stand by."""

    listen: str = field(default="127.0.0.1:0", metadata={"help": "host:port to serve on; port 0 picks a free one"})
    advertise: str = field(default="", metadata={"help": "host:port that others dial; empty: the bound address"})
    etcd: str = field(default="127.0.0.1:2379", metadata={"help": "etcd's endpoints, comma-separated host:port"})
    scheduler_id: str = field(default="", metadata={"help": "this scheduler's name; empty: one is drawn"})
    lease_ttl_s: int = field(default=2, metadata={"help": "seconds after which a dead leader is replaced"})
    max_queued: int = field(default=100_000, metadata={"help": "requests that may be queued in all"})
    max_queued_per_tenant: int = field(default=20_000, metadata={"help": "requests that one tenant may have queued"})
    worker_wait_s: float = field(
        default=30.0, metadata={"help": "seconds that a request waits while no worker could run it"}
    )
    interactive_queue_ms: float = field(
        default=200.0, metadata={"help": "time in the queue that is aimed at for interactive requests"}
    )
    standard_queue_ms: float = field(
        default=2000.0, metadata={"help": "time in the queue that is aimed at for standard requests"}
    )
    otlp_endpoint: str = field(default="", metadata={"help": "OTLP receiver of traces, host:port; empty: none"})
    trace_file: str = field(default="", metadata={"help": "file to append spans to, one JSON object a line"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})

    def __post_init__(self) -> None:
        check_listen(self.listen)
        for name, low in (("lease_ttl_s", 2), ("max_queued", 1), ("max_queued_per_tenant", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}")
        for name in ("interactive_queue_ms", "standard_queue_ms"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
        if not self.worker_wait_s >= 0:
            raise ConfigError("--worker-wait-s: must not be negative")
