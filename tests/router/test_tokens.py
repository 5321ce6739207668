"""JSON web tokens: whose is taken, what its claims stand for, and what is said of one that is wrong."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from manylora_router.guard.tokens import LEEWAY_S, MAX_KNOWN, Issuer, Tokens, read_issuers
from manylora_shared.errors import PermissionDenied, ServiceUnavailable, Unauthenticated
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import Scope

ISSUER = Issuer(issuer="https://idp", audience="manylora", jwks="https://idp/keys", tenant_claim="org.id")
PRIVATE = {"e": ec.generate_private_key(ec.SECP256R1()), "r": rsa.generate_private_key(65537, 2048)}
ALGORITHM = {"e": "ES256", "r": "RS256"}
NO_KEY = "this call needs a valid key"


def public(kid: str) -> jwt.PyJWK:
    algorithm = jwt.get_algorithm_by_name(ALGORITHM[kid])
    return jwt.PyJWK({**algorithm.to_jwk(PRIVATE[kid].public_key(), as_dict=True), "kid": kid, "alg": ALGORITHM[kid]})


PUBLIC = {kid: public(kid) for kid in PRIVATE}


def tokens(issuer: Issuer = ISSUER) -> Tokens:
    return Tokens([issuer], lambda issuer, kid: PUBLIC.get(kid or "", "unknown"))


def token(kid: str = "e", **claims: Any) -> str:
    said = {"iss": "https://idp", "aud": "manylora", "exp": 1000, "org": {"id": "acme"}, "scope": "generate other"}
    said = {name: value for name, value in (said | claims).items() if value is not None}
    return jwt.encode(said, PRIVATE[kid], algorithm=ALGORITHM[kid], headers={"kid": kid})


@pytest.mark.parametrize("kid", ["e", "r"])
def test_a_right_token_is_its_tenants_until_it_ends(kid: str) -> None:
    checked = tokens()
    given = token(kid)
    assert checked.recall(given, 5.0) is None
    principal = Principal("", TenantId("acme"), (Scope.GENERATE,))
    assert checked.principal(given, 5.0) == checked.recall(given, 999.0) == principal
    assert checked.recall(given, 1000 + LEEWAY_S) is None
    with pytest.raises(Unauthenticated, match="this token expired 40 s ago"):
        checked.principal(given, 1040.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"aud": "others"}, "for another audience"),
        ({"aud": None}, "no claim aud"),
        ({"exp": None}, "no claim exp"),
        ({"exp": True}, "exp is no time"),
        ({"exp": float("nan")}, "exp is no time"),
        ({"exp": float("inf")}, "exp is no time"),
        ({"exp": 10**400}, "exp is no time"),
        ({"nbf": 500}, "not valid yet"),
        ({"iss": "https://other"}, NO_KEY),
    ],
)
def test_what_is_wrong_with_a_signed_token_is_said(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Unauthenticated, match=says):
        tokens().principal(token(**changes), 5.0)


def forged(header: dict[str, Any], key: bytes) -> str:
    parts = [json.dumps(each).encode() for each in (header, jwt.decode(token(), options={"verify_signature": False}))]
    body = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = hmac.new(key, body, hashlib.sha256).digest() if key else b""
    return (body + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def test_a_forged_token_is_no_key() -> None:
    pem = (
        PRIVATE["e"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    stolen = jwt.encode(
        jwt.decode(token(), options={"verify_signature": False}),
        ec.generate_private_key(ec.SECP256R1()),
        algorithm="ES256",
        headers={"kid": "e"},
    )
    wrong = [
        forged({"alg": "HS256", "kid": "e"}, pem),  # the public key as a secret
        forged({"alg": "none", "kid": "e"}, b""),
        forged({"alg": "ES256", "kid": "e"}, b"x"),
        stolen,
        jwt.encode({"iss": "https://idp"}, PRIVATE["r"], algorithm="RS256", headers={"kid": "e"}),
        token().replace(".", ".A", 1),
        "a.b.c",
        "..",
        token(padding="x" * 9000),
        token()[:-4],
    ]
    for each in wrong:
        checked = tokens()
        for _ in range(2):
            with pytest.raises(Unauthenticated, match=NO_KEY):
                checked.principal(each, 5.0)
            with pytest.raises(Unauthenticated, match=NO_KEY):
                checked.recall(each, 6.0)


def test_a_key_that_is_fetched_is_waited_for_and_not_remembered_as_missing() -> None:
    state: list[Any] = ["asked"]
    checked = Tokens([ISSUER], lambda issuer, kid: state[0])
    with pytest.raises(ServiceUnavailable) as error:
        checked.principal(token(), 5.0)
    assert error.value.retry_after_s == 1.0
    state[0] = PUBLIC["e"]
    assert checked.principal(token(), 5.0).tenant_id == "acme"


def test_claims_are_mapped() -> None:
    issuer = Issuer(
        issuer="https://idp",
        audience="manylora",
        jwks="keys.json",
        tenant_claim="https://x.y/org",
        scopes_claim="realm.roles",
        class_claim="plan",
        tenants={"o1": "acme"},
        scopes={"use": "generate", "root": "operator"},
        classes={"free": "batch"},
    )
    checked = tokens(issuer)

    def principal(**claims: Any) -> Principal:
        given = {"https://x.y/org": "o1", "realm": {"roles": ["use", 7]}, "plan": "free", "org": None}
        return checked.principal(token(**(given | claims)), 5.0)

    assert principal() == Principal("", TenantId("acme"), (Scope.GENERATE,), "batch")
    assert principal(plan=None).qos_class == ""
    assert principal(realm={"roles": ["root", "use"]}) == Principal("", None, (Scope.OPERATOR,), "batch")
    for claims in (
        {"https://x.y/org": "o2"},
        {"https://x.y/org": None},
        {"realm": {"roles": ["generate"]}},
        {"realm": 7},
    ):
        with pytest.raises(PermissionDenied, match="claim"):
            principal(**claims)
    for scope in ("operator", "gateway", ["operator"], None):  # unless the configuration names them
        with pytest.raises(PermissionDenied, match="claim scope has no scope"):
            tokens().principal(token(scope=scope), 5.0)


def test_roles_come_from_a_claim() -> None:
    issuer = Issuer(
        issuer="https://idp",
        audience="manylora",
        jwks="keys.json",
        tenant_claim="org.id",
        roles_claim="groups",
        roles={"staff": "viewer", "ml": "admin", "root": "owner"},
    )
    checked = tokens(issuer)

    def principal(**claims: Any) -> Principal:
        return checked.principal(token(**({"sub": "ann"} | claims)), 5.0)

    generate = (Scope.GENERATE,)
    acme = TenantId("acme")
    assert principal(groups=["ml", "x"]) == Principal("", acme, generate, role="admin", subject="ann")
    assert principal(groups=["ml"], scope=None) == Principal("", acme, (), role="admin", subject="ann")
    assert principal(groups=["ml", "staff"]) == Principal("", None, (), role="viewer", subject="ann")
    assert principal(groups=["staff", "root"]) == Principal("", None, (), role="owner", subject="ann")
    assert principal(groups=["viewer", "owner"]) == Principal("", acme, generate, subject="ann"), "as it maps them"
    with pytest.raises(PermissionDenied, match="no scope that is known"):
        principal(groups=["x"], scope=None)
    with pytest.raises(PermissionDenied, match="names no tenant"):
        principal(groups=["ml"], org=None)
    with pytest.raises(PermissionDenied, match="no scope that is known"):
        principal(scope=["usage:read", "admin:x"], groups=[])


def test_what_is_remembered_is_bounded() -> None:
    """Strangers' tokens drove out right ones, and each then cost a look at all that were remembered."""
    checked, right = tokens(), token()
    checked.principal(right, 5.0)
    for i in range(MAX_KNOWN + 10):
        with pytest.raises(Unauthenticated):
            checked.principal(f"a.b.{i}", 5.0)
    assert len(checked._refused) == MAX_KNOWN
    assert checked.recall("a.b.9", 5.0) is None
    with pytest.raises(Unauthenticated):
        checked.recall("a.b.10", 5.0)
    assert checked.recall(right, 5.0) is not None
    assert all(error.__traceback__ is None for error, _ in checked._refused.values()), "it keeps what the call had"


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (None, "issuers: must be a list"),
        ({"issuers": [7]}, r"issuers\[0\]: must be a mapping"),
        ({"issuers": [{"issuer": "x", "audience": "y"}]}, "jwks"),
        ({"issuers": [{"issuer": "x", "audience": "", "jwks": "z"}]}, "audience: is missing"),
        ({"issuers": [{"issuer": "x", "audience": "y", "jwks": "http://idp/keys"}]}, "must be https"),
        ({"issuers": [{"issuer": "x", "audience": "y", "jwks": "z", "scopes": {"a": "root"}}]}, "'root' is not one of"),
        ({"issuers": [{"issuer": "x", "audience": "y", "jwks": "z", "roles": {"a": "root"}}]}, "'root' is not one of"),
        ({"issuers": [{"issuer": "x", "audience": "y", "jwks": "z", "roles_claim": "a"}]}, "roles: is missing"),
        ({"issuers": [{"issuer": "x", "audience": "y", "jwks": "z", "claims": {}}]}, "claims: is not one of"),
        ({"issuers": 2 * [{"issuer": "x", "audience": "y", "jwks": "z"}]}, "two have one name"),
    ],
)
def test_issuers_that_are_wrong(document: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_issuers(document)
