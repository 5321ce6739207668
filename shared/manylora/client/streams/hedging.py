"""The second call for an answer that is late, at another router. Owns its budget and its counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manylora_shared.errors import RpcError
from manylora_shared.transport.base import Stream

from manylora.client.retry import RetryBudget, RetryPolicy


@dataclass(frozen=True)
class HedgePolicy:
    """A call without its first frame after `after_s` is sent once more, to the next router where there are several. The
    first answer counts, and the other call is cancelled; where its first frame was not on the way, it costs nothing.
    """

    after_s: float
    share: float = 0.05  # of all calls
    burst: float = 5.0  # at once


class Hedging:
    def __init__(self, policy: HedgePolicy) -> None:
        self.sent = 0
        self.won = 0  # by the second call
        self._policy = policy
        self._budget = RetryBudget(RetryPolicy(budget_ratio=policy.share, budget_attempts=policy.burst))

    async def first(self, stream: Stream, again: Callable[[], Stream]) -> tuple[Stream, Any]:
        """The stream that answered first, and its first message. Raises the first stream's RpcError where none did."""
        self._budget.on_call()
        readers = {asyncio.ensure_future(stream.read()): stream}
        first = next(iter(readers))
        try:
            done, _ = await asyncio.wait([first], timeout=self._policy.after_s)
            if not done and self._budget.spend():
                self.sent += 1
                other = again()
                readers[asyncio.ensure_future(other.read())] = other
            waiting = set(readers)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for reader in sorted(done, key=lambda each: each is not first):
                    if reader.exception() is None:
                        self.won += reader is not first
                        return readers.pop(reader), reader.result()
            return readers.pop(first), first.result()
        finally:
            for reader, left in readers.items():
                left.cancel()
                reader.cancel()
                reader.add_done_callback(_heard)


def _heard(reader: asyncio.Future[Any]) -> None:
    if not reader.cancelled() and (error := reader.exception()) is not None and not isinstance(error, RpcError):
        raise error
