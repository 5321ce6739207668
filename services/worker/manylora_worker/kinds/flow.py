"""Whose work it is: the flow that a sequence is counted in, and whose prefix cache its request finds."""

from __future__ import annotations

from typing import NamedTuple

from manylora_shared.ids import QosClass, TenantId

FlowKey = tuple[TenantId, QosClass]


class CacheScope(NamedTuple):
    """Whose prefix cache a request finds and fills: its tenant's own, or its cache group's."""

    name: str
    is_group: bool
