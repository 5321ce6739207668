"""What became of the requests of late: when each came to what, never what it said. Times are the event loop's."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_router.history.shelf import Shelf

MAX_LIVES = 10_000
MAX_LIVES_OF_TENANT = 200


@dataclass(eq=False, slots=True)
class Life:
    """A time that is None has not come, or was not seen."""

    request_id: str
    tenant: str
    qos_class: str
    arrived_at: float
    adapter: str = ""  # NAME@VERSION; empty: the base model
    adapter_digest: str = ""
    adapter_found: str = ""  # where its weights were as it came to the worker: device, host, store
    admitted_at: float | None = None
    granted_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0  # on workers
    worker_id: str = ""
    queue_ms: float = 0.0
    adapter_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    longest_pause_s: float = 0.0  # between two frames with tokens
    pause_ended_at: float | None = None
    resumes: int = 0  # times that another worker went on with it
    resume_s: float = 0.0  # until its first token there, all together
    swaps: int = 0
    evictions: int = 0
    choices: int = 1
    max_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = ""  # empty: it has not ended

    @property
    def stage(self) -> str:
        """What it is at now."""
        if self.ended_at is not None:
            return "ended"
        if self.first_token_at is not None:
            return "streaming"
        if self.started_at is not None:
            return "prefill" if self.adapter_found in ("", "device") else "adapter"
        if self.granted_at is not None:
            return "granted"
        return "admission" if self.admitted_at is None else "queued"

    def tokens_came(self, now: float) -> None:
        if self.last_token_at is None:
            self.first_token_at = now
        elif now - self.last_token_at > self.longest_pause_s:
            self.longest_pause_s, self.pause_ended_at = now - self.last_token_at, now
        self.last_token_at = now


def new_lives() -> Shelf[Life]:
    return Shelf(most=MAX_LIVES, most_of_tenant=MAX_LIVES_OF_TENANT)
