"""Moves blocks of the device's arena between KV and adapters, between two steps, as the policy says. EngineCore writes
it.

A block that adapters give back counts as another tenant's: KV clears it before it is used. One that KV gives is free,
and no step under way clears it.
"""

from __future__ import annotations

from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.kinds.api import ArenaRunner
from manylora_worker.memory.arena import LOOK_S, ArenaPolicy
from manylora_worker.memory.block_pool import BlockPool


class Arena:
    def __init__(self, runner: ArenaRunner, pool: BlockPool, adapters: AdapterCache, policy: ArenaPolicy) -> None:
        self._runner = runner
        self._pool = pool
        self._adapters = adapters
        self._policy = policy
        self.adapter_blocks = len(runner.adapter_blocks)
        self._kv_was_short = False
        self._look_at = float("-inf")

    def look(self, now: float, *, kv_is_short: bool) -> None:
        self._kv_was_short |= kv_is_short
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        kv_was_short, self._kv_was_short = self._kv_was_short, False
        wanted = self._policy.wanted(
            self.adapter_blocks, kv_is_short=kv_was_short, adapters_are_short=self._adapters.is_short, now=now
        )
        if wanted > self.adapter_blocks:
            lent = self._pool.lend(wanted - self.adapter_blocks)
            self._runner.give_to_adapters(lent)
            self.adapter_blocks += len(lent)
            self._adapters.set_device_bytes(self._bytes(self.adapter_blocks), now)
        elif wanted < self.adapter_blocks:
            left_bytes = self._adapters.set_device_bytes(self._bytes(wanted), now)
            left = -(-left_bytes // self._runner.block_bytes)
            back = self._runner.take_from_adapters(self.adapter_blocks - left)
            self._pool.take_back(back)
            self.adapter_blocks -= len(back)
            self._adapters.set_device_bytes(self._bytes(self.adapter_blocks), now)

    def _bytes(self, blocks: int) -> int:
        return blocks * self._runner.block_bytes
