"""How many blocks of a device's arena adapters have now, and KV the rest (decision NN). Pure; EngineCore asks.

    floor <= adapters' blocks <= ceiling        `home` is what both agreed on: the setting of the worker

A side that is short is given what the other does not use. Where both are short each has its home at least.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S = 0.1
HOLD_S = 2.0  # what a side gave beyond its home does not come back sooner: neither prefixes nor adapters ping-pong
_STEPS = 64  # from one end to the other


@dataclass(frozen=True)
class ArenaLimits:
    """Blocks that adapters may have; the rest of `total` is KV's."""

    total: int
    floor: int
    home: int
    ceiling: int

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.home <= self.ceiling < self.total:
            raise ValueError("the arena's bounds must be 0 < floor <= home <= ceiling < total")

    @staticmethod
    def of(kv: int, adapters: int, least: int, most: int) -> ArenaLimits | None:
        """kv, adapters: blocks at first. KV keeps at least half of its own. None: there is no room to move in."""
        floor, ceiling = max(1, min(least, adapters)), min(max(most, adapters), adapters + kv // 2)
        return ArenaLimits(kv + adapters, floor, adapters, ceiling) if floor < ceiling else None

    @property
    def least_kv(self) -> int:
        return self.total - self.ceiling


class ArenaPolicy:
    def __init__(self, limits: ArenaLimits) -> None:
        self._limits = limits
        self._step = max(1, limits.total // _STEPS)
        self._grown_at = {True: float("-inf"), False: float("-inf")}  # adapters, KV: beyond home, when last

    def wanted(self, adapters: int, *, kv_is_short: bool, adapters_are_short: bool, now: float) -> int:
        """adapters: blocks that they have."""
        limits = self._limits
        if kv_is_short and adapters_are_short:
            goal = limits.home
        elif adapters_are_short:
            goal = limits.ceiling if adapters < limits.home or self._may_grow(now, adapters=True) else adapters
        elif kv_is_short:
            goal = limits.floor if adapters > limits.home or self._may_grow(now, adapters=False) else adapters
        else:
            return adapters
        wanted = min(goal, adapters + self._step) if goal > adapters else max(goal, adapters - self._step)
        if wanted > max(adapters, limits.home):
            self._grown_at[True] = now
        elif wanted < min(adapters, limits.home):
            self._grown_at[False] = now
        return wanted

    def _may_grow(self, now: float, *, adapters: bool) -> bool:
        """Beyond its home, unless the other has just done so."""
        return now - self._grown_at[not adapters] >= HOLD_S
