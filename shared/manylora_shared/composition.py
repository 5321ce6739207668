"""What a request computes with, as one text: an adapter's uid, or several with weights (`uid:0.5+uid`). Equal for equal
parts, whatever their order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from manylora_shared.adapter_reference import MAX_PARTS, MAX_WEIGHT
from manylora_shared.ids import AdapterDigest, AdapterKey, AdapterUid, Composition, digest_of, is_uid

RANKS_AT_ONCE = 16  # of a part, rounded up: what it takes of a worker's greatest rank


class Part(NamedTuple):
    uid: AdapterUid
    weight: float = 1.0


def key_of(parts: Iterable[Part]) -> AdapterKey:
    return Composition("+".join(uid if weight == 1 else f"{uid}:{weight!r}" for uid, weight in sorted(parts)))


@functools.lru_cache(maxsize=1 << 14)
def parts_of(key: AdapterKey) -> tuple[Part, ...]:
    """In order of uids. Raises ValueError: it is not what `key_of` made of parts that are allowed."""
    parts = []
    for text in key.split("+", MAX_PARTS):
        uid, colon, weight = text.partition(":")
        parts.append(Part(AdapterUid(uid), float(weight) if colon else 1.0))
        if not 0.0 < abs(parts[-1].weight) <= MAX_WEIGHT:
            raise ValueError(f"must have weights other than 0, from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    if len(parts) > MAX_PARTS:
        raise ValueError(f"has more than {MAX_PARTS} adapters")
    if len({part.uid for part in parts}) < len(parts):
        raise ValueError("has an adapter twice")
    if key_of(parts) != key:
        raise ValueError("is not written as adapters and their weights are")
    return tuple(parts)


def uids_of(key: AdapterKey) -> tuple[AdapterUid, ...]:
    return tuple(part.uid for part in parts_of(key))


@functools.lru_cache(maxsize=1 << 14)
def content_of(key: AdapterKey) -> AdapterDigest:
    """What it computes, whose copies it may be: an adapter's digest, or several with weights."""
    return AdapterDigest(key_of(Part(AdapterUid(digest_of(part.uid)), part.weight) for part in parts_of(key)))


def key_problem(key: str) -> str | None:
    """Of a key from outside."""
    try:
        parts = parts_of(Composition(key))
    except ValueError as error:
        return str(error)
    return None if all(is_uid(part.uid) for part in parts) else "is no adapter's"
