"""Who calls: API keys, what they may do, and how one is checked. Pure; owns no state.

A key is `mlk-<key id>-<secret>`: 64 random bits that name it and 256 that prove it. The store has the secret's sha256:
of 256 random bits that is enough, for nobody can try them, where a word of a person would need a slow hash and a salt.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated
from manylora_shared.ids import TenantId, name_problem
from manylora_shared.tenancy.key_limits import KeyLimits, limit_problems
from manylora_shared.tenancy.roles import CLUSTER_ROLES, TENANT_ROLES, Role, Scope, fits, granted

AUTHORIZATION_KEY = "authorization"
MAX_KEY_NAME_CHARS = 128
MAX_NETWORKS = 32
MAX_LIFETIME_S = 10 * 366 * 86400.0
_KEY = re.compile(r"mlk-([0-9a-f]{16})-([0-9a-f]{64})")
_BEARER = "bearer "
_NO_KEY_ID, _NO_SECRET = "0" * 16, "0" * 64
_NO_HASH = "0" * 64


@dataclass(frozen=True)
class Principal:
    key_id: str
    tenant_id: TenantId | None
    scopes: tuple[Scope, ...]
    qos_class: str = ""  # of all its requests; empty: they say it
    role: str = ""  # beside the scopes
    subject: str = ""  # whose a token is, as its issuer says
    limits: KeyLimits | None = None  # of the key; None: it has none of its own

    def may(self, scope: Scope) -> bool:
        return scope in granted(self.scopes, self.role)

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied."""
        if not self.may(scope):
            raise self.denied()

    def require_tenant(self, tenant: str) -> str:
        """The tenant that a call is about; an empty `tenant` means the key's own. What a key of no tenant may, it may
        in all of them. Raises PermissionDenied.
        """
        if self.tenant_id is None:
            return tenant
        if tenant not in ("", self.tenant_id):
            raise self.denied()
        return self.tenant_id

    def denied(self) -> PermissionDenied:
        # It tells of the key alone, so that it is the same whatever exists.
        held = ", ".join([*self.scopes, *([f"the role {self.role}"] if self.role else [])]) or "nothing"
        whose = f"in tenant {self.tenant_id}" if self.tenant_id is not None else "in no tenant"
        return PermissionDenied(f"this key does not permit the call: it is for {held} {whose}")


@dataclass(frozen=True)
class NewKey:
    key: str
    record: KeyRecord

    def __repr__(self) -> str:
        return f"NewKey({self.record.key_id})"


def new_key(
    getrandbits: Callable[[int], int],
    *,
    tenant_id: str,
    scopes: Iterable[str],
    name: str,
    now_unix_s: float,
    lifetime_s: float = 0.0,
    networks: Iterable[str] = (),
    role: str = "",
    requests_per_min: int = 0,
    tokens_per_min: int = 0,
    concurrency: int = 0,
) -> NewKey:
    """`getrandbits` is of a cryptographic source. Raises InvalidRequest with every field at fault."""
    wanted = list(dict.fromkeys(scopes))
    allowed = list(dict.fromkeys(networks))
    limits = {"requests_per_min": requests_per_min, "tokens_per_min": tokens_per_min, "concurrency": concurrency}
    _check(tenant_id, wanted, name, lifetime_s, allowed, role, limits)
    key_id, secret = f"{getrandbits(64):016x}", f"{getrandbits(256):064x}"
    record = KeyRecord(
        key_id=key_id,
        secret_hash=hash_of(key_id, secret),
        tenant_id=tenant_id,
        scopes=tuple(sorted(wanted)),
        name=name,
        created_unix_s=now_unix_s,
        expires_unix_s=now_unix_s + lifetime_s if lifetime_s else 0.0,
        networks=tuple(allowed),
        role=role,
        **limits,
    )
    return NewKey(f"mlk-{key_id}-{secret}", record)


def hash_of(key_id: str, secret: str) -> str:
    # The id is hashed too, so that a hash is worthless in another record.
    return hashlib.sha256(f"manylora-key-v1\0{key_id}\0{secret}".encode()).hexdigest()


def split_key(key: str) -> tuple[str, str] | None:
    """(key id, secret) of a well-formed key."""
    match = _KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def key_id_of(authorization: str) -> str:
    """Of a well-formed key; empty where there is none."""
    parts = split_key(bearer_of(authorization))
    return parts[0] if parts is not None else ""


def is_key(key: str, record: KeyRecord) -> bool:
    # True for a revoked record too.
    parts = split_key(key)
    return parts is not None and parts[0] == record.key_id and _matches(*parts, record)


def bearer(key: str) -> dict[str, str]:
    return {AUTHORIZATION_KEY: f"Bearer {key}"} if key else {}


def bearer_of(authorization: str) -> str:
    """Empty where it is of another kind."""
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""


def authenticate(
    given: str, record_of: Callable[[str], KeyRecord | None], *, now_unix_s: float, host: str | None = None
) -> Principal:
    """Who has the whole key is told what is wrong with it; to everybody else work and words are always the same.

    Args:
        host: from where it came; None: that was looked at before.

    Raises:
        Unauthenticated, or PermissionDenied where it may not be used from there.
    """
    key_id, secret = split_key(given) or (_NO_KEY_ID, _NO_SECRET)
    record = record_of(key_id)
    is_right = _matches(key_id, secret, record)
    if record is None or not is_right:
        raise no_key()
    if record.revoked_unix_s:
        raise Unauthenticated("this key was revoked")
    if has_expired(record, now_unix_s):
        raise Unauthenticated(f"this key expired {round(now_unix_s - record.expires_unix_s)} s ago")
    if host is not None and record.networks and not is_inside(host, record.networks):
        raise PermissionDenied(f"this key may not be used from {host}")
    known = [Scope(scope) for scope in record.scopes if scope in tuple(Scope)]
    tenant_id = TenantId(record.tenant_id) if record.tenant_id else None
    return Principal(key_id, tenant_id, tuple(known), role=record.role, limits=limits_of(record))


def limits_of(record: KeyRecord) -> KeyLimits | None:
    if not (record.requests_per_min or record.tokens_per_min or record.concurrency):
        return None
    return KeyLimits(record.key_id, record.requests_per_min, record.tokens_per_min, record.concurrency)


def no_key() -> Unauthenticated:
    return Unauthenticated("this call needs a valid key: `authorization: Bearer <key>`")


def has_expired(record: KeyRecord, now_unix_s: float) -> bool:
    return bool(record.expires_unix_s) and now_unix_s >= record.expires_unix_s


def host_of(peer: str) -> str:
    """Of gRPC's `ipv4:10.0.0.1:80` and `ipv6:[::1]:80`, or a bare host."""
    kind, colon, rest = peer.partition(":")
    if colon and kind in ("ipv4", "ipv6"):
        peer = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_inside(host: str, networks: Iterable[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in _network(network) for network in networks)


@functools.lru_cache(1024)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text)


def _matches(key_id: str, secret: str, record: KeyRecord | None) -> bool:
    expected = record.secret_hash if record is not None else _NO_HASH
    return hmac.compare_digest(hash_of(key_id, secret).encode(), expected.encode())


_FOR_KEYS = ("is for keys without a tenant", "is for keys that are bound to a tenant")  # of them that it does not fit


def _role_problems(role: str, scopes: list[str], *, has_tenant: bool) -> list[FieldViolation]:
    if role not in tuple(Role):
        return [FieldViolation("role", f"{role[:80]!r} is not one of {', '.join(Role)}")]
    if scopes:
        return [FieldViolation("role", "goes not with scopes: it is a set of them")]
    if role not in (TENANT_ROLES if has_tenant else CLUSTER_ROLES):
        return [FieldViolation("role", f"{role} {_FOR_KEYS[not has_tenant]}")]
    return []


def lifetime_problems(field: str, seconds: float) -> list[FieldViolation]:
    is_right = 0 <= seconds <= MAX_LIFETIME_S  # not a number is neither
    return [] if is_right else [FieldViolation(field, f"must be from 0 to {MAX_LIFETIME_S:g} seconds")]


def _check(
    tenant_id: str,
    scopes: list[str],
    name: str,
    lifetime_s: float,
    networks: list[str],
    role: str,
    limits: Mapping[str, int],
) -> None:
    found = limit_problems(**limits)
    if not tenant_id:
        found += [FieldViolation(limit, _FOR_KEYS[1]) for limit, value in limits.items() if value]
    if tenant_id and (problem := name_problem(tenant_id)):
        found.append(FieldViolation("tenant_id", problem))
    if role:
        found += _role_problems(role, scopes, has_tenant=bool(tenant_id))
    elif not scopes:
        found.append(FieldViolation("scopes", f"is empty, and so is role; there are {', '.join(Scope)}"))
    for scope in scopes:
        if scope not in tuple(Scope):
            found.append(FieldViolation("scopes", f"{scope[:80]!r} is not one of {', '.join(Scope)}"))
        elif not fits(scope, has_tenant=bool(tenant_id)):
            found.append(FieldViolation("scopes", f"{scope} {_FOR_KEYS[not tenant_id]}"))
    if len(name) > MAX_KEY_NAME_CHARS or not (name.isprintable()):
        found.append(FieldViolation("name", f"must be at most {MAX_KEY_NAME_CHARS} printable characters"))
    found += lifetime_problems("lifetime_s", lifetime_s)
    if len(networks) > MAX_NETWORKS:
        found.append(FieldViolation("networks", f"has more than {MAX_NETWORKS}"))
    for network in networks[:MAX_NETWORKS]:
        try:
            _network(network)
        except ValueError as e:
            found.append(FieldViolation("networks", str(e)[:200]))
    if found:
        raise InvalidRequest.of_all(found)
