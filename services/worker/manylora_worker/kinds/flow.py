"""Whose work it is, and whose prefix cache its request finds."""

from __future__ import annotations

from typing import NamedTuple

from manylora_shared.ids import QosClass, TenantId

FlowKey = tuple[TenantId, QosClass]


class CacheScope(NamedTuple):
    """A tenant's own prefix cache, or its cache group's."""

    name: str
    is_group: bool
