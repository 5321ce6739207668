"""Whose a JSON web token is: its signature, its claims, and what they stand for here. Owns what was checked lately."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import jwt
from manylora_shared.address import is_loopback
from manylora_shared.errors import ManyloraError, PermissionDenied, ServiceUnavailable, Unauthenticated
from manylora_shared.ids import QosClass, TenantId, is_valid_name
from manylora_shared.tenancy.identity import Principal, no_key
from manylora_shared.tenancy.roles import CLUSTER_ROLES, CLUSTER_SCOPES, TENANT_SCOPES, Role, Scope

ALGORITHMS = ("RS256", "ES256")
LEEWAY_S = 30.0
MAX_TOKEN_CHARS = 8 * 1024
REFUSED_S = 10.0  # for so long a wrong token is known to be one
MAX_KNOWN = 4_096  # right tokens, and as many wrong ones: these drive out none of those
_LAST_S = 253_402_300_799.0  # the year 9999

V = TypeVar("V")
KeyState = Literal["unknown", "asked"]  # asked: the issuer's keys are being fetched
KeyOf = Callable[["Issuer", str | None], jwt.PyJWK | KeyState]


@dataclass(frozen=True, kw_only=True)
class Issuer:
    """One whose tokens are taken. What a claim says is looked up in its map, if that has entries."""

    issuer: str
    audience: str
    jwks: str  # a file, or an https URL
    tenant_claim: str = "tenant"
    scopes_claim: str = "scope"
    roles_claim: str = ""  # empty: tokens have none
    class_claim: str = ""  # empty: requests say their class themselves
    tenants: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("issuer", "audience", "jwks", "tenant_claim", "scopes_claim"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is missing")
        url = urlsplit(self.jwks)
        if self.roles_claim and not self.roles:
            raise ValueError("roles: is missing: it says which role a text of roles_claim stands for")
        if url.scheme == "http" and not is_loopback(url.hostname or ""):
            raise ValueError("jwks: an http URL can be forged on the way; it must be https")
        for name, known in (("scopes", tuple(Scope)), ("roles", tuple(Role)), ("classes", tuple(QosClass))):
            for value in getattr(self, name).values():
                if value not in known:
                    raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")

    @property
    def is_url(self) -> bool:
        return urlsplit(self.jwks).scheme in ("http", "https")


def read_issuers(document: Any) -> list[Issuer]:
    """Raises ValueError, naming the field."""
    entries = document.get("issuers") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError("issuers: must be a list")
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(Issuer(**_checked(entry)))
        except (ValueError, TypeError) as e:
            raise ValueError(f"issuers[{number}]: {e}") from None
    if len({each.issuer for each in found}) < len(found):
        raise ValueError("issuers: two have one name")
    return found


def _checked(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError("must be a mapping")
    fields = {each.name: each for each in dataclasses.fields(Issuer)}
    for name, value in entry.items():
        if name not in fields:
            raise ValueError(f"{name}: is not one of {', '.join(fields)}")
        if name in ("tenants", "scopes", "roles", "classes"):
            if not isinstance(value, dict) or not all(isinstance(each, str) for each in [*value, *value.values()]):
                raise ValueError(f"{name}: must map texts to texts")
        elif not isinstance(value, str):
            raise ValueError(f"{name}: must be a text")
    return entry


def is_token(given: str) -> bool:
    return given.count(".") == 2


class Tokens:
    def __init__(self, issuers: Sequence[Issuer], key_of: KeyOf) -> None:
        self._issuers = {each.issuer: each for each in issuers}
        self._key_of = key_of
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._refused: dict[bytes, tuple[ManyloraError, float]] = {}

    def recall(self, token: str, now: float) -> Principal | None:
        """Of a token that was looked at lately: it costs next to nothing. Raises as `principal` does."""
        digest = _digest(token)
        refused = self._refused.get(digest)
        if refused is not None and refused[1] > now:
            raise type(refused[0])(refused[0].message)
        known = self._known.get(digest)
        return known[0] if known is not None and known[1] > now else None

    def principal(self, token: str, now: float) -> Principal:
        """Raises Unauthenticated, PermissionDenied, or ServiceUnavailable while its key is fetched."""
        try:
            found, until = self._read(token, now)
        except (Unauthenticated, PermissionDenied) as e:
            _keep(self._refused, token, (type(e)(e.message), now + REFUSED_S))  # without what it came through
            raise
        _keep(self._known, token, (found, until))
        return found

    def _read(self, token: str, now: float) -> tuple[Principal, float]:
        issuer, claims = self._claims(token)
        until = _time(claims, "exp")
        if now >= until + LEEWAY_S:
            raise Unauthenticated(f"this token expired {round(now - until)} s ago")
        if "nbf" in claims and now < _time(claims, "nbf") - LEEWAY_S:
            raise Unauthenticated("this token is not valid yet (nbf)")
        return _principal(issuer, claims), until + LEEWAY_S

    def _claims(self, token: str) -> tuple[Issuer, Mapping[str, Any]]:
        """Of a token whose signature is right."""
        if len(token) > MAX_TOKEN_CHARS:
            raise no_key()
        try:
            header = jwt.get_unverified_header(token)
            claimed = jwt.decode(token, options={"verify_signature": False})
        except jwt.InvalidTokenError:
            raise no_key() from None
        named = claimed.get("iss")
        issuer = self._issuers.get(named) if isinstance(named, str) else None
        if issuer is None or header.get("alg") not in ALGORITHMS:
            raise no_key()
        key = self._key_of(issuer, header.get("kid"))
        if key == "asked":
            raise ServiceUnavailable("the token's key is not here yet: it is being fetched", retry_after_s=1.0)
        if not isinstance(key, jwt.PyJWK) or key.algorithm_name not in ALGORITHMS:
            raise no_key()
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=issuer.audience,
                issuer=issuer.issuer,
                # times are looked at by the caller's clock
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidAudienceError:
            raise Unauthenticated("this token is for another audience") from None
        except jwt.MissingRequiredClaimError as e:
            raise Unauthenticated(f"this token has no claim {e.claim}") from None
        except jwt.InvalidTokenError:
            raise no_key() from None
        return issuer, claims


def _keep(kept: dict[bytes, V], token: str, value: V) -> None:
    if len(kept) >= MAX_KNOWN:
        del kept[next(iter(kept))]
    kept[_digest(token)] = value


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LAST_S:
        raise Unauthenticated(f"this token's claim {name} is no time")
    return float(value)


def _principal(issuer: Issuer, claims: Mapping[str, Any]) -> Principal:
    """Raises PermissionDenied: the token is right, and not of use here."""
    role = _role(issuer, claims)
    said = _values(claims, issuer.scopes_claim)
    scopes = {issuer.scopes.get(each) if issuer.scopes else each for each in said}
    # others only where the configuration names them
    allowed = tuple(Scope) if issuer.scopes else tuple(s for s in Scope if s in TENANT_SCOPES)
    held = tuple(scope for scope in allowed if scope in scopes)
    if not held and not role:
        raise PermissionDenied(f"this token's claim {issuer.scopes_claim} has no scope that is known here")
    qos_class = _mapped(claims, issuer.class_claim, issuer.classes) if issuer.class_claim else ""
    if qos_class and qos_class not in tuple(QosClass):
        raise PermissionDenied(f"this token's claim {issuer.class_claim} names no class")
    subject = claims.get("sub")
    subject = subject if isinstance(subject, str) else ""
    if role in CLUSTER_ROLES or any(scope in CLUSTER_SCOPES for scope in held):
        kept = tuple(s for s in held if s in CLUSTER_SCOPES)
        return Principal("", None, kept, qos_class, role if role in CLUSTER_ROLES else "", subject)
    tenant = _mapped(claims, issuer.tenant_claim, issuer.tenants)
    if not is_valid_name(tenant):
        raise PermissionDenied(f"this token's claim {issuer.tenant_claim} names no tenant")
    return Principal("", TenantId(tenant), held, qos_class, role, subject)


def _role(issuer: Issuer, claims: Mapping[str, Any]) -> str:
    """The first of Role's that the claim stands for; empty: none."""
    said = _values(claims, issuer.roles_claim) if issuer.roles_claim else []
    found = {issuer.roles[each] for each in said if each in issuer.roles}
    return next((role.value for role in Role if role in found), "")


def _mapped(claims: Mapping[str, Any], claim: str, names: Mapping[str, str]) -> str:
    value = _claim(claims, claim)
    text = value if isinstance(value, str) else ""
    return names.get(text, "") if names else text


def _values(claims: Mapping[str, Any], claim: str) -> list[str]:
    """A list, or a text with spaces between (RFC 8693)."""
    value = _claim(claims, claim)
    if isinstance(value, str):
        return value.split()
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """By its whole name, else by its path: `realm_access.roles`."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
