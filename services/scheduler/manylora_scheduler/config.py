"""The scheduler's settings. Parsed once, in `__main__`; never changed."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_shared.process.config import setting
from manylora_shared.process.settings import ServiceSettings


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(ServiceSettings):
    """Scheduler: decides which request runs next, and where. One leads, others stand by."""

    lease_ttl_s: int = setting(5, "how long standbys take a silent leader for alive", at_least=2)
    scheduler_id: str = setting("", "this scheduler's name; empty: one is drawn")
    etcd_quota_mb: int = setting(
        2048, "etcd's --quota-backend-bytes in MiB, where it does not tell it (before 3.6)", at_least=1
    )
    max_queued: int = setting(100_000, "requests that may be queued in all", at_least=1)
    max_queued_per_tenant: int = setting(20_000, "requests that one tenant may have queued", at_least=1)
    worker_wait_s: float = setting(30.0, "seconds that a request waits while no worker could run it", at_least=0)
    interactive_queue_ms: float = setting(
        200.0, "time in the queue that is aimed at for interactive requests", at_least=1
    )
    standard_queue_ms: float = setting(2000.0, "time in the queue that is aimed at for standard requests", at_least=1)
