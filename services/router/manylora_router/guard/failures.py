"""How many calls without a valid key a peer may make. Pure; owns a leaking count a host.

A right key is never refused here: it cannot be guessed, and behind a proxy all callers are one host. What is bounded is
what wrong ones cost in work and log lines.
"""

from __future__ import annotations

import ipaddress

from manylora_shared.errors import HttpError, Overloaded, Unauthenticated

BURST = 100.0
PER_S = 5.0
MAX_HOSTS = 4_096


class TooManyFailures(Overloaded):
    own_http = HttpError(429, "rate_limit_error")


class Failures:
    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # what is left of the count, and when that was

    def check(self, host: str, now: float) -> None:
        """Raises Overloaded where it has no more."""
        level = self._level(_account(host), now)
        if level >= BURST:
            raise _too_many(host, level)

    def note(self, host: str, now: float, error: Unauthenticated) -> None:
        """Raises Overloaded in the error's place, where these are too many."""
        account = _account(host)
        level = self._level(account, now)
        if level + 1 > BURST:
            raise _too_many(host, level) from error
        self._counts.pop(account, None)
        if len(self._counts) >= MAX_HOSTS:
            self._make_room(now)
        self._counts[account] = level + 1, now

    def _level(self, account: str, now: float) -> float:
        level, at = self._counts.get(account, (0.0, now))
        return max(0.0, level - PER_S * (now - at))

    def _make_room(self, now: float) -> None:
        self._counts = {each: count for each, count in self._counts.items() if self._level(each, now) > 0}
        if len(self._counts) >= MAX_HOSTS:
            del self._counts[next(iter(self._counts))]  # who failed last the longest ago


def _account(host: str) -> str:
    """Of IPv6 a /64: whoever has one has all of it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _too_many(host: str, level: float) -> TooManyFailures:
    told = f"too many calls without a valid key come from {host}"
    return TooManyFailures(told, retry_after_s=max(1.0, (level + 1 - BURST) / PER_S))
