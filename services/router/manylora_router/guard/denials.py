"""Which refused calls the audit log tells one by one, and how many it only counts. Pure.

Whoever is refused again and again, with a key or without, cannot make the log grow faster than this.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST = 16.0  # of one account, told one by one
PER_S = 0.1
ALL_BURST = 128.0  # of all accounts together
ALL_PER_S = 1.0
MAX_ACCOUNTS = 256
MAX_HOSTS = 8  # that are named in a count
COUNT_S = 60.0


@dataclass
class _Bucket:
    level: float
    at: float

    def take(self, burst: float, per_s: float, now: float) -> bool:
        self.level = min(burst, self.level + per_s * max(0.0, now - self.at))
        self.at = now
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True


class Denials:
    def __init__(self) -> None:
        self._all: _Bucket | None = None
        self._accounts: dict[str, _Bucket] = {}
        self._counts: dict[str, int] = {}  # by host, of those that were not told
        self._num_others = 0  # from hosts that had no room among these
        self._since = 0.0

    def is_told(self, account: str, host: str, now: float) -> bool:
        """Whether the log tells of this one; else it is counted."""
        if self._all is None:
            self._all = _Bucket(ALL_BURST, now)
        bucket = self._accounts.get(account)
        if bucket is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
            bucket = self._accounts[account] = _Bucket(BURST, now)
        if bucket.take(BURST, PER_S, now) and self._all.take(ALL_BURST, ALL_PER_S, now):
            return True
        self.count(host, now)
        return False

    def count(self, host: str, now: float) -> None:
        if not self._counts and not self._num_others:
            self._since = now
        if host in self._counts or len(self._counts) < MAX_ACCOUNTS:
            self._counts[host] = self._counts.get(host, 0) + 1
        else:
            self._num_others += 1

    def counted(self, now: float, *, is_last: bool = False) -> str:
        """What was counted in the last minute, once it is over; empty: nothing, or it is not over."""
        num = sum(self._counts.values()) + self._num_others
        if not num or (now - self._since < COUNT_S and not is_last):
            return ""
        most = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))[:MAX_HOSTS]
        named = ", ".join(f"{host or 'nowhere'} {count}" for host, count in most)
        told = f"{num} more refused calls in {now - self._since:.0f} s, of {len(self._counts)} hosts; most of: {named}"
        self._counts, self._num_others = {}, 0
        return told
