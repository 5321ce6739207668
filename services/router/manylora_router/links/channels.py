"""Channels to workers: one an address, kept while its worker is in the pool or a stream uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from manylora_shared.transport.base import Channel, Transport


@dataclass(eq=False)
class _Pooled:
    channel: Channel
    is_member: bool
    users: int = 0


class WorkerChannels:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pooled: dict[str, _Pooled] = {}
        self._members: tuple[str, ...] = ()
        self._closing: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    @property
    def num_users(self) -> int:
        return sum(pooled.users for pooled in self._pooled.values())

    def acquire(self, address: str) -> Channel:
        """Until `release`."""
        pooled = self._pooled.get(address)
        if pooled is None:
            # A grant may name a worker that has left, or that this router has not heard of yet.
            pooled = self._pooled[address] = _Pooled(self._transport.connect(address), address in self._members)
        pooled.users += 1
        return pooled.channel

    def release(self, address: str) -> None:
        pooled = self._pooled[address]
        pooled.users -= 1
        self._close_unused(address, pooled)

    def retain(self, members: Collection[str]) -> None:
        """Closes the channels to other addresses, each once nobody uses it."""
        self._members = tuple(members)
        for address, pooled in list(self._pooled.items()):
            pooled.is_member = address in self._members
            self._close_unused(address, pooled)

    async def close(self) -> None:
        """Whoever uses them."""
        for address, pooled in list(self._pooled.items()):
            pooled.is_member, pooled.users = False, 0
            self._close_unused(address, pooled)
        await asyncio.gather(*self._closing)

    def _close_unused(self, address: str, pooled: _Pooled) -> None:
        if pooled.users == 0 and not pooled.is_member:
            del self._pooled[address]
            task = asyncio.create_task(pooled.channel.close(), name=f"close channel to {address}")
            self._closing[task] = None
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        del self._closing[task]
        if not task.cancelled():
            task.result()
