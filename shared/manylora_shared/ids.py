"""Names of things. Owns the identifier types and their syntax; imports nothing of the project."""

from __future__ import annotations

import enum
import re
from typing import NewType

TenantId = NewType("TenantId", str)
AdapterName = NewType("AdapterName", str)  # inside its tenant's namespace
AdapterDigest = NewType("AdapterDigest", str)  # sha256 (hex) over an adapter's content
# one copy of an adapter in a cluster's memory: its digest, and behind an @ the tenant whose own it is
AdapterUid = NewType("AdapterUid", str)
Composition = NewType("Composition", str)  # several with weights (composition.py)
AdapterKey = AdapterUid | Composition  # what a request computes with
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)

DEFAULT_POOL = "default"  # of the workers that name none
MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile("[0-9a-f]{64}")
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9._-]")


def is_valid_name(name: str) -> bool:
    return name_problem(name) is None


def name_problem(name: str) -> str | None:
    """Which rule of names it breaks; None: it is one."""
    if _NAME.fullmatch(name) and ".." not in name:
        return None
    if not name:
        return "is missing"
    if len(name) > MAX_NAME_CHARS:
        return f"has {len(name)} characters, more than {MAX_NAME_CHARS}"
    if wrong := _NOT_IN_A_NAME.search(name):
        return f"has {wrong[0]!a}; a name is of a-z 0-9 . _ -"
    if ".." in name:
        return "has '..', which no name may have"
    return f"begins with {name[0]!r}; a name begins with a letter or digit"


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def adapter_uid(digest: AdapterDigest, owner: TenantId | None) -> AdapterUid:
    """owner: None: of all tenants that share copies."""
    return AdapterUid(digest if owner is None else f"{digest}@{owner}")


def digest_of(uid: AdapterUid) -> AdapterDigest:
    return AdapterDigest(uid.partition("@")[0])


def owner_of(uid: AdapterUid) -> TenantId | None:
    return TenantId(uid.partition("@")[2]) or None


def is_uid(text: str) -> bool:
    digest, at, owner = text.partition("@")
    return is_digest(digest) and (is_valid_name(owner) if at else True)


class QosClass(enum.StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"
