"""Which registered workers are of their pool: those that compute what the pool's first one to start computes."""

from __future__ import annotations

from collections.abc import Mapping

from manylora_shared.coordination.records import WorkerRecord

PROTOCOL = 1
"""Of the messages between services. It grows where a service of the version before would misread one."""
MAX_POOLS = 64  # each has queues, levels and a model's limits in every router and scheduler


def kept_out(workers: Mapping[str, WorkerRecord]) -> dict[str, str]:
    """Worker id -> why its pool does not take it. So who joins changes nothing for those who are there."""
    firsts: dict[str, WorkerRecord] = {}
    reasons: dict[str, str] = {}
    for worker in sorted(workers.values(), key=lambda worker: (worker.started_unix_s, worker.worker_id)):
        if worker.pool not in firsts and len(firsts) >= MAX_POOLS:
            reasons[worker.worker_id] = f"there are {MAX_POOLS} pools already, and {worker.pool} is none of them"
            continue
        first = firsts.setdefault(worker.pool, worker)
        if worker.computes != first.computes:
            reasons[worker.worker_id] = _difference(worker, first)
    return reasons


def _difference(worker: WorkerRecord, first: WorkerRecord) -> str:
    parts = [
        f"{what} {found or 'not told'}, the pool's is {expected or 'not told'}"
        for what, found, expected in zip(
            ("base model", "dtype", "quantization", "rotation", "protocol"), _words(worker), _words(first), strict=True
        )
        if found != expected
    ]
    return f"it does not compute what {first.worker_id} does: {'; '.join(parts)}"


def _words(worker: WorkerRecord) -> tuple[str, str, str, str, str]:
    digest, dtype, quantization, rotation, protocol = worker.computes
    return f"{worker.model_name} ({digest[:12]})", dtype, quantization, rotation or "the model's own", str(protocol)
