"""Who calls: API keys, what they may do, and how one is checked. Pure; owns no state.

A key is `mlk-<key id>-<secret>`: 64 random bits that name it and 256 that prove it. The store has the secret's sha256.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated
from manylora_shared.ids import TenantId, name_problem

AUTHORIZATION_KEY = "authorization"
MAX_KEY_NAME_CHARS = 128
_KEY = re.compile(r"mlk-([0-9a-f]{16})-([0-9a-f]{64})")
_BEARER = "bearer "
_NO_KEY_ID, _NO_SECRET = "0" * 16, "0" * 64
_NO_HASH = "0" * 64


class Scope(enum.StrEnum):
    GENERATE = "generate"
    ADMIN = "admin"
    GATEWAY = "gateway"
    OPERATOR = "operator"


TENANT_SCOPES = (Scope.GENERATE, Scope.ADMIN)
CLUSTER_SCOPES = (Scope.GATEWAY, Scope.OPERATOR)


@dataclass(frozen=True)
class Principal:
    key_id: str
    tenant_id: TenantId | None
    scopes: tuple[Scope, ...]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied."""
        if not self.may(scope):
            raise self.denied()

    def require_tenant(self, tenant: str, scopes: Iterable[Scope]) -> str:
        """The tenant that a call is about; an empty `tenant` means the key's own. Raises PermissionDenied."""
        if self.may(Scope.OPERATOR):
            return tenant
        if self.tenant_id is None or tenant not in ("", self.tenant_id) or not any(self.may(s) for s in scopes):
            raise self.denied()
        return self.tenant_id

    def denied(self) -> PermissionDenied:
        # It tells of the key alone, so that it is the same whatever exists.
        held = ", ".join(self.scopes) or "nothing"
        whose = f"in tenant {self.tenant_id}" if self.tenant_id is not None else "in no tenant"
        return PermissionDenied(f"this key does not permit the call: it is for {held} {whose}")


@dataclass(frozen=True)
class NewKey:
    key: str
    record: KeyRecord

    def __repr__(self) -> str:
        return f"NewKey({self.record.key_id})"


def new_key(
    getrandbits: Callable[[int], int], *, tenant_id: str, scopes: Iterable[str], name: str, now_unix_s: float
) -> NewKey:
    """`getrandbits` is of a cryptographic source. Raises InvalidRequest with every field at fault."""
    wanted = list(dict.fromkeys(scopes))
    _check(tenant_id, wanted, name)
    key_id, secret = f"{getrandbits(64):016x}", f"{getrandbits(256):064x}"
    record = KeyRecord(
        key_id=key_id,
        secret_hash=hash_of(key_id, secret),
        tenant_id=tenant_id,
        scopes=tuple(sorted(wanted)),
        name=name,
        created_unix_s=now_unix_s,
    )
    return NewKey(f"mlk-{key_id}-{secret}", record)


def hash_of(key_id: str, secret: str) -> str:
    # The id is hashed too, so that a hash is worthless in another record.
    return hashlib.sha256(f"manylora-key-v1\0{key_id}\0{secret}".encode()).hexdigest()


def split_key(key: str) -> tuple[str, str] | None:
    """(key id, secret) of a well-formed key."""
    match = _KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def is_key(key: str, record: KeyRecord) -> bool:
    # True for a revoked record too.
    parts = split_key(key)
    return parts is not None and parts[0] == record.key_id and _matches(*parts, record)


def bearer(key: str) -> dict[str, str]:
    return {AUTHORIZATION_KEY: f"Bearer {key}"} if key else {}


def authenticate(metadata: Mapping[str, str], record_of: Callable[[str], KeyRecord | None]) -> Principal:
    """Raises Unauthenticated. Work and words are the same whatever is wrong with the key."""
    value = metadata.get(AUTHORIZATION_KEY, "")
    given = value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else ""
    key_id, secret = split_key(given) or (_NO_KEY_ID, _NO_SECRET)
    record = record_of(key_id)
    is_right = _matches(key_id, secret, record)
    if record is None or not is_right or record.revoked_unix_s:
        raise Unauthenticated("this call needs a valid key, in its metadata as `authorization: Bearer <key>`")
    known = [Scope(scope) for scope in record.scopes if scope in tuple(Scope)]
    return Principal(key_id, TenantId(record.tenant_id) if record.tenant_id else None, tuple(known))


def _matches(key_id: str, secret: str, record: KeyRecord | None) -> bool:
    expected = record.secret_hash if record is not None else _NO_HASH
    return hmac.compare_digest(hash_of(key_id, secret).encode(), expected.encode())


def _check(tenant_id: str, scopes: list[str], name: str) -> None:
    found: list[FieldViolation] = []
    if tenant_id and (problem := name_problem(tenant_id)):
        found.append(FieldViolation("tenant_id", problem))
    if not scopes:
        found.append(FieldViolation("scopes", f"is empty; there are {', '.join(Scope)}"))
    for scope in scopes:
        if scope not in tuple(Scope):
            found.append(FieldViolation("scopes", f"{scope[:80]!r} is not one of {', '.join(Scope)}"))
        elif (scope in TENANT_SCOPES) != bool(tenant_id):
            needs = (
                "is for keys that are bound to a tenant" if scope in TENANT_SCOPES else "is for keys without a tenant"
            )
            found.append(FieldViolation("scopes", f"{scope} {needs}"))
    if len(name) > MAX_KEY_NAME_CHARS or not (name.isprintable()):
        found.append(FieldViolation("name", f"must be at most {MAX_KEY_NAME_CHARS} printable characters"))
    if found:
        raise InvalidRequest.of_all(found)
