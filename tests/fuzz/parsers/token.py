"""A JSON web token: as bytes, or as header and claims that the issuer has signed."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from manylora_router.guard.tokens import Issuer, Tokens

from tests.fuzz.harness import Harness

_KEY = ec.derive_private_key(7, ec.SECP256R1())
_ALGORITHM: Any = jwt.get_algorithm_by_name("ES256")
_PUBLIC = jwt.PyJWK({**_ALGORITHM.to_jwk(_KEY.public_key(), as_dict=True), "kid": "k", "alg": "ES256"})
_ISSUER = Issuer(issuer="i", audience="a", jwks="https://i/keys", class_claim="plan", tenant_claim="org.id")
_NOW = 1000.0


def run(data: bytes) -> None:
    """{"header": ..., "claims": ...}, or the token itself"""
    tokens = Tokens([_ISSUER], lambda issuer, kid: _PUBLIC if kid == "k" else "unknown")
    given = _signed(data) or data.decode("latin-1")
    principal = tokens.principal(given, _NOW)
    assert tokens.recall(given, _NOW) == principal
    assert tokens.recall(given, 1e12) is None, "it never ends"


def _signed(data: bytes) -> str:
    try:
        given = json.loads(data)
        parts = [json.dumps(given[name]).encode() for name in ("header", "claims")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    signed = b".".join(map(_text, parts))
    return (signed + b"." + _text(_ALGORITHM.sign(signed, _KEY))).decode()


def _text(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


HARNESS = Harness(run, is_json=True)
