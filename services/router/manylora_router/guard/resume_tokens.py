"""What a caller shows of an answer that a router of this cluster began for it, so that another one goes on with it.

A token says that the prompt was admitted and is charged. Pure; the signature is its giver's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import DEFAULT_POOL, TenantId

from manylora_router.guard.admission import RequestInput

VALID_S = 86_400.0
FIELD, EMITTED = "resume.token", "resume.emitted"
_MAX_TOKEN_CHARS = 4_096
_SIGNATURE_BYTES = 16


@dataclass(frozen=True)
class Begun:
    """What holds to an answer's end, whoever makes the rest of it."""

    request_id: str
    tenant_id: TenantId
    prompt: str  # digest_of its tokens
    adapter: str  # NAME@VERSION, or several with weights; empty: the base model
    seed: int
    n: int
    max_tokens: int  # in force
    asked_max_tokens: int  # other than that: overload took the difference
    overload_level: int
    expires_unix_s: float
    pool: str = DEFAULT_POOL


class ResumeTokens:
    def __init__(self, sign: Callable[[bytes], bytes]) -> None:
        self._sign = sign

    def seal(self, begun: Begun) -> str:
        data = json.dumps(asdict(begun), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._signature(data) + data).decode()

    def open(self, token: str, tenant: str, now_unix_s: float) -> Begun:
        """Raises InvalidRequest. A foreign tenant's is none."""
        try:
            data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            data = b""
        signature, data = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        if len(token) > _MAX_TOKEN_CHARS or not hmac.compare_digest(signature, self._signature(data)):
            raise InvalidRequest.of(FIELD, "is not one that a router of this cluster gave")
        begun = Begun(**json.loads(data))
        if begun.tenant_id != tenant:
            raise InvalidRequest.of(FIELD, "is not one that a router of this cluster gave")
        if begun.expires_unix_s < now_unix_s:
            raise InvalidRequest.of(FIELD, "has expired")
        return begun

    def _signature(self, data: bytes) -> bytes:
        return self._sign(b"resume\0" + data)[:_SIGNATURE_BYTES]


def go_on(request: RequestInput, begun: Begun) -> RequestInput:
    """The request as it was begun: with its version of the adapter, its seed and its bound."""
    sampling = replace(request.sampling, seed=begun.seed)
    return replace(request, adapter=begun.adapter, model=begun.pool, max_tokens=begun.max_tokens, sampling=sampling)


def check(request: RequestInput, begun: Begun, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest where the request, or what its caller has, is not of what was begun."""
    assert request.resume is not None
    resume = request.resume
    if digest_of(prompt_token_ids) != begun.prompt or (request.n or 1) != begun.n:
        raise InvalidRequest.of(FIELD, "is of a request with another prompt or n")
    if len(resume.emitted) != begun.n:
        raise InvalidRequest.of(EMITTED, f"must be one a choice, {begun.n}")
    for index, (token_ids, _) in enumerate(resume.emitted):
        if len(token_ids) > begun.max_tokens:
            raise InvalidRequest.of(f"{EMITTED}[{index}]", f"has more tokens than max_tokens, {begun.max_tokens}")
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest.of(f"{EMITTED}[{index}]", f"has a token beyond the vocabulary of {vocab_size}")
    if request.sampling.prompt_logprobs is not None:
        raise InvalidRequest.of("sampling.prompt_logprobs", "are told by the router that began the answer alone")


def digest_of(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("I", token_ids).tobytes()).hexdigest()[:32]
