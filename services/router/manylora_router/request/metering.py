"""What one request comes to in the usage ledger: a row, opened with its first grant, closed when its use is settled.

One that ended before any worker had it has a row too; one that was refused has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora_shared.ledger.row import UsageRow
from manylora_shared.telemetry.traceparent import trace_id_of

from manylora_router.ledger.rows import Rows
from manylora_router.request.choices import Choices
from manylora_router.request.job import Job
from manylora_router.request.token_lease import TokenLease


@dataclass(frozen=True, kw_only=True)
class End:
    """How it went, as its execution knows at the end."""

    outcome: str
    queue_ms: float
    ttft_ms: float
    duration_ms: float
    worker_id: str
    adapter_found: str
    is_degraded: bool


class Meter:
    def __init__(self, rows: Rows, job: Job, choices: Choices, lease: TokenLease) -> None:
        self._rows = rows
        self._choices = choices
        self._lease = lease
        self._job = job
        self._facts: dict[str, Any] | None = None  # of its row, once that is open
        self._end: End | None = None
        self._reused_tokens = 0
        self._resumes = 0
        self._taken_over: Sequence[int] = ()  # tokens of each choice

    def check_room(self) -> None:
        """Raises ServiceUnavailable."""
        self._rows.check_room()

    @property
    def is_open(self) -> bool:
        return self._facts is not None

    def granted(self) -> None:
        if self._facts is None:
            self._facts = self._begun()
            self._rows.open(UsageRow(**self._facts), self._amounts)

    def resumed(self) -> None:
        self._resumes += 1
        self._reused_tokens += self._choices.num_tokens

    def taken_over(self) -> None:
        """From another router, whose row has what was given by then."""
        self._taken_over = self._choices.lengths()
        self.resumed()

    def ended(self, end: End) -> None:
        """`close` follows, at once or later."""
        self._end = end

    def close(self) -> None:
        """Its use is settled. Idempotent."""
        end, self._end = self._end, None
        if end is None:
            return
        lease, shape = self._lease, self._rows.served(self._job.pool).shape
        charge, prompt = lease.charge, lease.used_prompt_tokens
        computed = shape.decode(prompt, self._choices.lengths()) - shape.decode(prompt, self._taken_over)
        facts = self._facts or self._begun()
        facts |= {
            "outcome": end.outcome,
            "degraded": end.is_degraded,
            "queue_ms": end.queue_ms,
            "ttft_ms": end.ttft_ms,
            "duration_ms": end.duration_ms,
            "worker": end.worker_id,
            "adapter_loads": int(end.adapter_found in ("host", "store")),
            "prompt_tokens": charge.prompt,
            "cached_tokens": charge.cached,
            "completion_tokens": charge.completion,
            "unread_tokens": charge.unread,
            "reused_tokens": self._reused_tokens,
            "resumes": self._resumes,
            "kv_byte_seconds": round(lease.kv_byte_seconds),
            "adapter_byte_seconds": round(lease.adapter_byte_seconds),
            "prefill_flops": shape.prefill(charge.prompt, charge.cached),
            "decode_flops": max(0, computed),
            "ended_unix_s": self._rows.now_unix_s(),
        }
        self._rows.close(UsageRow(**facts))

    def _amounts(self) -> tuple[int, ...]:
        charge = self._lease.charge
        return charge.prompt, charge.cached, charge.completion, self._reused_tokens, self._resumes

    def _begun(self) -> dict[str, Any]:
        """Of a row, what is known before it has used anything."""
        job, now_unix_s = self._job, self._rows.now_unix_s()
        waited_s = asyncio.get_running_loop().time() - job.received_at
        parts = job.adapter.parts if job.adapter is not None else ()
        return {
            "request_id": job.request_id,
            "tenant": job.tenant_id,
            "key": job.key_id,
            "pool": job.pool,
            "qos_class": job.qos_class.value,
            "model": self._rows.served(job.pool).model,
            "adapter": "+".join([part.name for part in parts]),
            "adapter_version": "+".join([str(part.version or "") for part in parts]),
            "adapter_digest": job.adapter.digest if job.adapter is not None else "",
            "choices": job.n,
            "began_unix_s": now_unix_s - waited_s,
            "ended_unix_s": now_unix_s,
            "trace_id": trace_id_of(job.traceparent),
            "router": self._rows.router_id,
        }
