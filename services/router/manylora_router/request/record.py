"""One request's part in what its router remembers: brought up to date as it goes on, and whenever somebody looks."""

from __future__ import annotations

from collections.abc import Sequence

from manylora_router.history.lives import Life
from manylora_router.history.recent import Recent
from manylora_router.request.execution import Execution
from manylora_router.request.frames import Frame


class Record:
    def __init__(self, recent: Recent, life: Life) -> None:
        self.life = life
        self._recent = recent
        self._execution: Execution | None = None
        recent.came(life)

    def begun(self, execution: Execution, now: float) -> None:
        life, job = self.life, execution.job
        life.admitted_at = now
        if job.adapter is not None:
            life.adapter, life.adapter_digest = job.adapter.reference, job.adapter.digest
        life.choices, life.prompt_tokens = job.n, len(job.prompt_token_ids)
        self._execution = execution
        self.look()

    def look(self) -> None:
        """Writes what is known of it by now."""
        life, execution = self.life, self._execution
        if execution is None:
            return
        life.max_tokens = execution.job.max_tokens
        life.attempts, life.queue_ms = execution.attempts, execution.queue_ms
        life.granted_at, life.started_at = execution.granted_at, execution.started_at
        life.worker_id, life.adapter_found = execution.worker_id, execution.adapter_found
        life.resumes, life.resume_s = len(execution.pauses_s), sum(execution.pauses_s)
        life.completion_tokens = execution.completion_tokens
        word = execution.word
        life.cached_prompt_tokens = execution.cached_prompt_tokens
        life.adapter_wait_ms, life.prefill_ms, life.decode_ms = word.adapter_wait_ms, word.prefill_ms, word.decode_ms
        life.swaps, life.evictions = word.swaps, word.evictions

    def told(self, frames: Sequence[Frame], now: float) -> None:
        tokens = tokens_in(frames)
        if tokens:
            if self.life.first_token_at is None:
                self.look()
            self._recent.tokens_came(self.life, tokens, now)

    def ended(self, outcome: str, now: float, *, is_completed: bool, is_rejected: bool) -> None:
        self.look()
        self._execution = None
        self._recent.ended(self.life, outcome, now, is_completed=is_completed, is_rejected=is_rejected)


def tokens_in(frames: Sequence[Frame]) -> int:
    return sum(len(frame.delta.token_ids) for frame in frames if frame.delta is not None)
