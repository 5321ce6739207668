"""Limits of single keys, below their tenants' quotas: what each key used, over all routers. Pure.

A request takes all tokens that it may use, and gives back what it did not; so no limit of a key ends a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.ids import RequestId, TenantId
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.tenancy.quota import TokenBucket

BUSY_RETRY_NS = 500_000_000
MAX_KEYS = 65_536  # that are remembered; those that could be forgotten go first
_PER_MIN = 60  # units of a bucket that one request or token takes: it gains a minute's limit in as many


@dataclass
class _Key:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    running: dict[RequestId, int] = field(default_factory=dict)  # tokens that each took


@dataclass(frozen=True)
class Finding:
    quota: str
    limit: int
    description: str
    wait_ns: int | None  # None: waiting does not help
    capacity: int = 0  # of a bucket


class KeyBook:
    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._keys: dict[tuple[TenantId, str], _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def findings(self, tenant_id: TenantId, limits: KeyLimits, tokens: int, now_ns: int) -> list[Finding]:
        """What speaks against one more request that may use so many tokens."""
        key = self._key(tenant_id, limits, now_ns)
        found: list[Finding] = []
        whose = f"key {limits.key_id}"
        if limits.concurrency and len(key.running) >= limits.concurrency:
            told = f"{len(key.running)} requests of {whose} run or wait already"
            found.append(Finding("key.concurrency", limits.concurrency, told, BUSY_RETRY_NS))
        if key.requests is not None and (wait_ns := key.requests.wait_ns(_PER_MIN, now_ns)):
            told = f"no more than {limits.requests_per_min} requests a minute of {whose} are admitted"
            found.append(Finding("key.requests_per_min", limits.requests_per_min, told, wait_ns))
        if key.tokens is not None:
            wait_ns = key.tokens.wait_ns(tokens * _PER_MIN, now_ns)
            if wait_ns != 0:
                left = max(0, key.tokens.level(now_ns)) // _PER_MIN
                told = f"{tokens} tokens may be used, and {whose} has {left} of {limits.tokens_per_min} a minute left"
                found.append(Finding("key.tokens_per_min", limits.tokens_per_min, told, wait_ns))
        return found

    def begin(self, tenant_id: TenantId, limits: KeyLimits, request_id: RequestId, tokens: int, now_ns: int) -> None:
        # Only after `findings` had none.
        key = self._key(tenant_id, limits, now_ns)
        if key.requests is not None:
            key.requests.take(_PER_MIN, now_ns)
        if key.tokens is not None:
            key.tokens.take(tokens * _PER_MIN, now_ns)
        key.running[request_id] = tokens

    def end(self, tenant_id: TenantId, limits: KeyLimits, request_id: RequestId, used: int, now_ns: int) -> None:
        key = self._keys.get((tenant_id, limits.key_id))
        took = key.running.pop(request_id, None) if key is not None else None
        if key is not None and took is not None and key.tokens is not None:
            key.tokens.give_back(max(0, took - used) * _PER_MIN, now_ns)

    def _key(self, tenant_id: TenantId, limits: KeyLimits, now_ns: int) -> _Key:
        """With the limits that the key has now."""
        name = (tenant_id, limits.key_id)
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= MAX_KEYS:
                self._make_room(now_ns)
            key = self._keys[name] = _Key()
        key.requests = self._bucket(key.requests, limits.requests_per_min, now_ns)
        key.tokens = self._bucket(key.tokens, limits.tokens_per_min, now_ns)
        return key

    def _bucket(self, before: TokenBucket | None, per_min: int, now_ns: int) -> TokenBucket | None:
        # A new one begins as if it had been filling since the term began: that gives nobody a burst.
        if not per_min:
            return None
        if before is None:
            return TokenBucket(per_min, per_min * _PER_MIN, self._began_ns, level=0)
        if before.rate != per_min:
            before.change(per_min, per_min * _PER_MIN, now_ns)
        return before

    def _make_room(self, now_ns: int) -> None:
        """Without those that nothing would be lost of; else without the one that came first."""
        idle = [name for name, key in self._keys.items() if not key.running and _is_full(key, now_ns)]
        for name in idle or [next(iter(self._keys))]:
            del self._keys[name]


def _is_full(key: _Key, now_ns: int) -> bool:
    return all(bucket is None or bucket.level(now_ns) >= bucket.burst for bucket in (key.requests, key.tokens))
