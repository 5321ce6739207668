"""When the client tries again by itself, how often in all, and after how long. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from manylora_shared.errors import Code, RpcError


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter. `max_attempts` counts the first one."""

    max_attempts: int = 4
    base_delay_s: float = 0.1
    max_delay_s: float = 5.0
    budget_ratio: float = 0.1
    budget_attempts: float = 10.0
    resume_s: float = 30.0  # for so long it is tried to go on with an answer whose router was lost; 0: never

    def going_on_s(self, attempt: int, rng: random.Random) -> float:
        """Before an attempt to go on with an answer; the first, 0, is at once."""
        return min(1.0, self.base_delay_s * 2 ** (attempt - 1)) * rng.uniform(0.5, 1.0) if attempt else 0.0

    def delay_s(self, error: RpcError, attempt: int, rng: random.Random, *, repeatable: bool = True) -> float | None:
        """None: do not try again. `attempt` is the number of the failed one, from 1."""
        # Only two failures are tried again, and only while nothing was delivered: RESOURCE_EXHAUSTED with the server's
        # hint, and UNAVAILABLE for calls that may safely happen twice.
        if attempt >= self.max_attempts:
            return None
        if error.code is Code.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            delay_s = error.retry_after_s * rng.uniform(1.0, 1.25)
            return delay_s if delay_s <= self.max_delay_s else None
        if error.code is Code.UNAVAILABLE and repeatable:
            backoff_s = min(self.max_delay_s, self.base_delay_s * 2 ** (attempt - 1)) * rng.uniform(0.5, 1.0)
            if error.retry_after_s is not None:  # a guess at when it is back, so no reason to give up where it is long
                hint_s = min(self.max_delay_s, error.retry_after_s * rng.uniform(1.0, 1.25))
                backoff_s = max(backoff_s, hint_s)
            return float(backoff_s)
        return None


class RetryBudget:
    """Each call puts `budget_ratio` of an attempt in, each repetition takes a whole one out. It begins full. Source:
    Google's SRE book, "Handling Overload", per-client retry budget.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._ratio = policy.budget_ratio
        self._capacity = policy.budget_attempts
        self._attempts = policy.budget_attempts

    def on_call(self) -> None:
        self._attempts = min(self._capacity, self._attempts + self._ratio)

    def spend(self) -> bool:
        if self._attempts < 1.0:
            return False
        self._attempts -= 1.0
        return True


DEFAULT_RETRY = RetryPolicy()
