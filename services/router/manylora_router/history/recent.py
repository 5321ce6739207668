"""What a router remembers of late for the console. Written by its calls; bounded, and lost with the process."""

from __future__ import annotations

from collections.abc import Iterable

from manylora_router.history.adapter_use import AdapterUses
from manylora_router.history.lives import Life, new_lives
from manylora_router.history.samples import Samples, Standing


class Recent:
    def __init__(self) -> None:
        self.lives = new_lives()
        self.samples = Samples()
        self.adapters = AdapterUses()

    def came(self, life: Life) -> None:
        self.lives.put(life.tenant, life.request_id, life)

    def tokens_came(self, life: Life, tokens: int, now: float) -> None:
        is_first = life.first_token_at is None
        life.tokens_came(now)
        self.samples.tokens_came(life.tenant, tokens)
        if is_first:
            self.samples.first_token(
                life.tenant,
                prompt_tokens=life.prompt_tokens,
                ttft_ms=1e3 * (now - life.arrived_at),
                queue_ms=life.queue_ms,
            )

    def ended(self, life: Life, outcome: str, now: float, *, is_completed: bool, is_rejected: bool) -> None:
        life.outcome, life.ended_at = outcome, now
        self.samples.ended(life.tenant, is_rejected=is_rejected, is_failed=not is_completed and not is_rejected)
        if life.adapter and life.started_at is not None:
            self.adapters.used(
                life.tenant, life.adapter, found=life.adapter_found, waited_ms=life.adapter_wait_ms, now=now
            )

    def close_step(self, live: Iterable[Life], now: float) -> None:
        standing: dict[str, Standing] = {}
        for life in live:
            is_running = life.started_at is not None
            before = standing.get(life.tenant, Standing(0, 0))
            standing[life.tenant] = Standing(before.waiting + (not is_running), before.running + is_running)
        self.samples.close_step(standing, now)
