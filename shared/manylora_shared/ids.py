"""Names of things. Owns the identifier types and their syntax; imports nothing of the project."""

from __future__ import annotations

import enum
import re
from typing import NewType

TenantId = NewType("TenantId", str)
AdapterName = NewType("AdapterName", str)  # inside its tenant's namespace
# sha256 (hex) over an adapter's content; names with equal bytes share one, a reload with other bytes has another
AdapterUid = NewType("AdapterUid", str)
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def is_valid_name(name: str) -> bool:
    """NAME_PATTERN, and no `..` that a path could read."""
    return _NAME.fullmatch(name) is not None and ".." not in name


class QosClass(enum.StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"
