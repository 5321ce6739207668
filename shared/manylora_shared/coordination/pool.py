"""Which of the registered workers are one pool: those that compute what the one that started first computes."""

from __future__ import annotations

from collections.abc import Mapping

from manylora_shared.coordination.records import WorkerRecord


def kept_out(workers: Mapping[str, WorkerRecord]) -> dict[str, str]:
    """Worker id -> in what it differs from the pool. So who joins changes nothing for those who are there."""
    if not workers:
        return {}
    first = min(workers.values(), key=lambda worker: (worker.started_unix_s, worker.worker_id))
    return {name: _difference(worker, first) for name, worker in workers.items() if worker.computes != first.computes}


def _difference(worker: WorkerRecord, first: WorkerRecord) -> str:
    parts = [
        f"{what} {found or 'not told'}, the pool's is {expected or 'not told'}"
        for what, found, expected in zip(
            ("base model", "dtype", "quantization"), _words(worker), _words(first), strict=True
        )
        if found != expected
    ]
    return f"it does not compute what {first.worker_id} does: {'; '.join(parts)}"


def _words(worker: WorkerRecord) -> tuple[str, str, str]:
    digest, dtype, quantization = worker.computes
    return f"{worker.model_name} ({digest[:12]})", dtype, quantization
