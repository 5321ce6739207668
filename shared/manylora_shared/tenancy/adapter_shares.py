"""How a worker's adapter memory is shared out between tenants, for the worker and the router alike. Pure; owns nothing.

All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
_SCALE_BITS = 20
_NONE: Mapping[object, int] = {}


def max_min(
    wants: Mapping[K, int], weights: Mapping[K, int], capacity: int, floors: Mapping[K, int] | None = None
) -> dict[K, int]:
    """Shares of `capacity`: clamp(weight * level, floor, want) at the one level at which they fill it.

    Water-filling (Bertsekas and Gallager, Data Networks, 6.5.2), with floors. `weights` has every key of `wants`.
    """
    if sum(wants.values()) <= capacity:
        return dict(wants)
    least = {key: min(want, (floors or _NONE).get(key, 0)) for key, want in wants.items()}
    # Where a share begins and ends to grow with the level, in 2^-20 bytes by unit of weight. Both are rounded so that
    # the sum is never taken for less than it is.
    turns = [((least[key] << _SCALE_BITS) // weights[key], weights[key]) for key in wants]
    turns += [(-((-want << _SCALE_BITS) // weights[key]), -weights[key]) for key, want in wants.items()]
    turns.sort()
    total, level, slope = sum(least.values()) << _SCALE_BITS, 0, 0
    capacity <<= _SCALE_BITS
    if total >= capacity:
        return least
    for at, change in turns:
        if slope and total + slope * (at - level) > capacity:
            level += (capacity - total) // slope
            break
        total += slope * (at - level)
        level = at
        slope += change
    shares = {key: min(want, max(least[key], weights[key] * level >> _SCALE_BITS)) for key, want in wants.items()}
    left = (capacity >> _SCALE_BITS) - sum(shares.values())
    for key, want in wants.items():  # what rounding has left over: a byte each at most
        if left > 0 and shares[key] < want:
            shares[key] += 1
            left -= 1
    return shares


def honoured_pins(
    pins: Mapping[K, Sequence[int]], weights: Mapping[K, int], capacity: int, largest: int
) -> dict[K, list[bool]]:
    """By tenant, in the policy's order: all if they leave room for `largest`, else what fits into the max-min share."""
    wants = {key: sum(sizes) for key, sizes in pins.items()}
    shares = max_min(wants, weights, max(0, capacity - largest))
    honoured: dict[K, list[bool]] = {}
    for key, sizes in pins.items():
        left, kept = shares[key], []
        for size in sizes:
            kept.append(size <= left)
            left -= size if size <= left else 0
        honoured[key] = kept
    return honoured


def pins_problem(
    key: K,
    pins: Mapping[K, Sequence[int]],
    registered: Mapping[K, int],
    weights: Mapping[K, int],
    capacity: int,
    *,
    own_other: int,
    largest: int,
) -> str | None:
    """Why one tenant's pins are refused, or None; `own_other` is its largest adapter that it does not pin, or 0.

    `capacity` is the smallest worker's.
    """
    own = pins.get(key, ())
    total = sum(own)
    wants = {**registered, key: max(total, registered.get(key, 0))}
    share = max_min(wants, weights, capacity)[key]
    if len(own) > 1 and total + own_other > share:
        beside = f", and another of its adapters {own_other}" if own_other else ""
        return (
            f"the pinned adapters take {total} bytes{beside}: more than the tenant's share, {share} of the {capacity} "
            f"bytes that a worker has for adapters, beside {len(wants) - 1} other tenants with adapters"
        )
    others = sum(sum(sizes) for tenant, sizes in pins.items() if tenant != key)
    if total and total + others > capacity - largest:
        return (
            f"the pinned adapters take {total} bytes, those that other tenants have pinned {others}: more than the "
            f"{max(0, capacity - largest)} that a worker with {capacity} bytes for adapters has left beside the "
            f"largest adapter ({largest})"
        )
    return None
