"""Whose the device's adapter memory was, and for how long: each adapter's bytes are shared out among the requests that
use it at a time, so what all of them are told adds up to the memory that was in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora_shared.ids import AdapterUid, RequestId


@dataclass(slots=True)
class _Adapter:
    num_users: int = 0
    since: float = 0.0
    share: float = 0.0  # byte-seconds that one has got who has used it all the time

    def passes(self, size_bytes: int, now: float) -> None:
        if now > self.since:
            if self.num_users:
                self.share += size_bytes * (now - self.since) / self.num_users
            self.since = now


class UseMeter:
    def __init__(self) -> None:
        self._adapters: dict[AdapterUid, _Adapter] = {}  # that are used
        self._sizes: dict[AdapterUid, int] = {}
        self._users: dict[RequestId, Mapping[AdapterUid, float]] = {}  # with the shares when they began

    def begin(self, user: RequestId, sizes: Mapping[AdapterUid, int], now: float) -> None:
        began: dict[AdapterUid, float] = {}
        for uid, size_bytes in sizes.items():
            adapter = self._adapters.setdefault(uid, _Adapter(since=now))
            self._sizes[uid] = size_bytes
            adapter.passes(size_bytes, now)
            adapter.num_users += 1
            began[uid] = adapter.share
        self._users[user] = began

    def end(self, user: RequestId, now: float) -> float:
        """Byte-seconds; 0 of who has not begun."""
        total = 0.0
        for uid, began in self._users.pop(user, {}).items():
            adapter = self._adapters[uid]
            adapter.passes(self._sizes[uid], now)
            total += adapter.share - began
            adapter.num_users -= 1
            if not adapter.num_users:
                del self._adapters[uid], self._sizes[uid]
        return total

    def check_invariants(self) -> None:
        users: dict[AdapterUid, int] = {}
        for began in self._users.values():
            for uid in began:
                users[uid] = users.get(uid, 0) + 1
        assert users == {uid: each.num_users for uid, each in self._adapters.items()}
        assert self._sizes.keys() == users.keys()
