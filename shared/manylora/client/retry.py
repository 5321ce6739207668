"""When the client tries again by itself, and after how long. Pure: the jitter's source of randomness is passed in.

Only two failures are tried again, and only while nothing of the request was delivered: RESOURCE_EXHAUSTED with the
server's own hint, and UNAVAILABLE (for calls that may safely happen twice). Everything else is the caller's to judge.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from manylora_shared.errors import Code, RpcError


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, bounded in number and in each delay. `max_attempts` counts the first one."""

    max_attempts: int = 4
    base_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, error: RpcError, attempt: int, rng: random.Random, *, repeatable: bool = True) -> float | None:
        """How long to wait before the next attempt; None: do not try again.

        Args:
            attempt: the number of the attempt that failed, from 1.
            repeatable: whether the call may safely happen twice; where not, UNAVAILABLE ends it.
        """
        if attempt >= self.max_attempts:
            return None
        if error.code is Code.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            delay_s = error.retry_after_s * rng.uniform(1.0, 1.25)
            return delay_s if delay_s <= self.max_delay_s else None
        if error.code is Code.UNAVAILABLE and repeatable:
            return float(min(self.max_delay_s, self.base_delay_s * 2 ** (attempt - 1)) * rng.uniform(0.5, 1.0))
        return None


DEFAULT_RETRY = RetryPolicy()
