"""Token buckets and the leases cut from them (docs/decisions/0011). Pure and exact: whole numbers, time passed in.

Owns one flow's account, in which always `settled + leased <= burst + rate * t`. Extensions go before new leases. After
Doorman (youtube/doorman, doc/design.md).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
NANOS = 1_000_000_000


def to_ns(seconds: float) -> int:
    return round(seconds * NANOS)


@dataclass(frozen=True, slots=True)
class QuotaLevel:
    """What a bucket holds; `quota`: its path in the policy."""

    quota: str
    limit: int
    left: int
    full_in_s: float


class TokenBucket:
    """Holds up to `burst` tokens and gains `rate` a second. Below zero it is in debt and gives nothing."""

    def __init__(self, rate: int, burst: int, now_ns: int, *, level: int) -> None:
        assert rate >= 1
        assert 0 <= level <= burst
        self.rate = rate
        self.burst = burst
        self._level_nanos = level * NANOS
        self._at_ns = now_ns

    def level(self, now_ns: int) -> int:
        self._advance(now_ns)
        return self._level_nanos // NANOS

    def told(self, quota: str, now_ns: int) -> QuotaLevel:
        full_ns = self.wait_ns(self.burst, now_ns)
        assert full_ns is not None
        return QuotaLevel(quota, self.burst, max(0, self.level(now_ns)), full_ns / NANOS)

    def wait_ns(self, tokens: int, now_ns: int) -> int | None:
        """None: it never will hold so many."""
        if tokens > self.burst:
            return None
        self._advance(now_ns)
        missing = tokens * NANOS - self._level_nanos
        return max(0, -(-missing // self.rate))

    def take(self, tokens: int, now_ns: int) -> None:
        # Ask `wait_ns` first, unless the bucket is to go into debt.
        self._advance(now_ns)
        self._level_nanos -= tokens * NANOS

    def give_back(self, tokens: int, now_ns: int) -> None:
        # What does not fit is lost.
        self._advance(now_ns)
        self._level_nanos = min(self.burst * NANOS, self._level_nanos + tokens * NANOS)

    def change(self, rate: int, burst: int, now_ns: int) -> None:
        self._advance(now_ns)
        self.rate, self.burst = rate, burst
        self._level_nanos = min(burst * NANOS, self._level_nanos)

    def _advance(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            gained = self.rate * (now_ns - self._at_ns)
            self._level_nanos = min(self.burst * NANOS, self._level_nanos + gained)
            self._at_ns = now_ns


@dataclass
class _Lease:
    tokens: int | None  # debited in all; None: not bounded
    own_tokens: int  # of these, debited from this account's bucket: no more come back


class FlowAccount(Generic[K]):
    """Without a bucket leases are not bounded."""

    def __init__(self, bucket: TokenBucket | None) -> None:
        self.bucket = bucket
        self.settled_tokens = 0
        self._leases: dict[K, _Lease] = {}
        self._pending: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: K) -> bool:
        return key in self._leases

    @property
    def leased_tokens(self) -> int:
        return sum(lease.tokens or 0 for lease in self._leases.values())

    @property
    def pending_tokens(self) -> int:
        return sum(self._pending.values())

    def tokens_of(self, key: K) -> int | None:
        """None: not bounded."""
        return self._leases[key].tokens

    def wait_ns(self, tokens: int, now_ns: int) -> int | None:
        """Until a new lease could be cut, behind all extensions. None: never."""
        if self.bucket is None:
            return 0
        if tokens > self.bucket.burst:
            return None
        behind = tokens + self.pending_tokens
        missing = behind - self.bucket.burst
        if missing <= 0:
            return self.bucket.wait_ns(behind, now_ns)
        # More than the bucket ever holds at once: it has to be filled, emptied into the extensions, and filled on.
        full_ns = self.bucket.wait_ns(self.bucket.burst, now_ns)
        assert full_ns is not None
        return full_ns - (-missing * NANOS // self.bucket.rate)

    def open(self, key: K, tokens: int, now_ns: int) -> None:
        # Only after `wait_ns` said 0.
        assert key not in self._leases
        if self.bucket is None:
            self._leases[key] = _Lease(None, 0)
            return
        assert self.wait_ns(tokens, now_ns) == 0
        self._debit(tokens, now_ns)
        self._leases[key] = _Lease(tokens, tokens)

    def take_over(self, key: K, tokens: int | None) -> None:
        # The tokens were debited by an earlier leader, so they are not given back here.
        assert key not in self._leases
        self._leases[key] = _Lease(tokens, 0)

    def extend(self, key: K, tokens: int) -> None:
        # What waits already is not repeated.
        assert self._leases[key].tokens is not None
        self._pending.setdefault(key, tokens)

    def give_up(self, key: K) -> None:
        self._pending.pop(key, None)

    def serve(self, now_ns: int) -> list[K]:
        """Grants extensions as far as the bucket reaches. Returns whose lease grew."""
        grown: list[K] = []
        for key, wanted in list(self._pending.items()):
            tokens = wanted if self.bucket is None else min(wanted, self.bucket.burst)
            if self.bucket is not None and self.bucket.wait_ns(tokens, now_ns) != 0:
                break
            del self._pending[key]
            lease = self._leases[key]
            assert lease.tokens is not None
            if self.bucket is not None:
                self._debit(tokens, now_ns)
                lease.own_tokens += tokens
            lease.tokens += tokens
            grown.append(key)
        return grown

    def next_service_ns(self, now_ns: int) -> int | None:
        """When the next extension can be granted; None: none waits."""
        if not self._pending:
            return None
        wanted = next(iter(self._pending.values()))
        if self.bucket is None:
            return now_ns
        wait_ns = self.bucket.wait_ns(min(wanted, self.bucket.burst), now_ns)
        assert wait_ns is not None
        return now_ns + wait_ns

    def settle(self, key: K, used: int, now_ns: int) -> None:
        """The rest comes back. More than was leased is debited now, as debt."""
        lease = self._end(key)
        self.settled_tokens += used
        if lease.tokens is None or self.bucket is None:
            return
        if used > lease.tokens:
            self.bucket.take(used - lease.tokens, now_ns)
        else:
            self.bucket.give_back(min(lease.tokens - used, lease.own_tokens), now_ns)

    def write_off(self, key: K) -> None:
        # The holder is gone and may have used all of it, so nothing comes back.
        self._end(key)

    def _end(self, key: K) -> _Lease:
        self._pending.pop(key, None)
        return self._leases.pop(key)

    def _debit(self, tokens: int, now_ns: int) -> None:
        assert self.bucket is not None
        self.bucket.take(tokens, now_ns)
