"""Errors as clients read them: the document, the event of a stream, and the headers that clients go by."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manylora_shared.errors import Code, HttpError, InvalidRequest, ManyloraError, retry_after_header, shown
from manylora_shared.tenancy.quota import QuotaLevel

_ROUTERS_NAMES = (
    ("sampling.", ""),
    ("prompt.chat.messages", "messages"),
    ("prompt.chat.", ""),
    ("prompt.chat", "messages"),
    ("prompt.text", "prompt"),
    ("prompt.token_ids", "prompt"),
)
_FIELD = re.compile(r"([a-z][a-z0-9_.\[\]-]*): ")
_BASE = re.compile(r"[^.\[]*")
_RETRIED = (Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION)  # by clients, from the status alone


_KINDS = {
    "token_bucket": "tokens",
    "tokens_per_min": "tokens",
    "requests_per_s": "requests",
    "requests_per_min": "requests",
    "concurrency": "requests",
    "max_queued": "requests",
}

Names = Mapping[str, str]  # what this caller calls a field, by what the router calls it


class MethodNotAllowed(InvalidRequest):
    own_http = HttpError(405, "invalid_request_error")

    def __init__(self, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{shown(path)} takes {' or '.join(allowed)}")
        self.allowed = allowed


class ErrorForm:
    """OpenAI's; other endpoints have their own."""

    def document(self, error: ManyloraError, names: Names) -> dict[str, Any]:
        if error.violations:
            told = [(_name(v.field, names), v.description) for v in error.violations]
            param: str | None = told[0][0]
            message = "; ".join(f"{field}: {description}" for field, description in told)
        else:
            field = _FIELD.match(error.message)
            param = _name(field[1], names) if field else None
            message = f"{param}: {error.message[field.end() :]}" if field else error.message
        return {"error": {"message": message, "type": error.http.type, "param": param, "code": error.label}}

    def event(self, error: ManyloraError, names: Names) -> bytes:
        return b"data: " + json.dumps(self.document(error, names)).encode() + b"\n\n"


def headers(error: ManyloraError) -> dict[str, str]:
    told: dict[str, str] = {}
    if (after := retry_after_header(error.retry_after_s)) is not None:
        told["retry-after"] = after
        assert error.retry_after_s is not None
        told["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
    elif error.code in _RETRIED:
        told["x-should-retry"] = "false"
    for breach in sorted(error.breaches, key=lambda each: each.capacity > 0):  # the last of a kind is told: a bucket
        if (kind := _kind(breach.quota)) is None:
            continue
        told[f"x-ratelimit-limit-{kind}"] = str(breach.capacity or breach.limit)
        told[f"x-ratelimit-remaining-{kind}"] = "0"
        if error.retry_after_s is not None:
            told[f"x-ratelimit-reset-{kind}"] = _duration(error.retry_after_s)
    if error.code is Code.UNAUTHENTICATED:
        told["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        told["allow"] = ", ".join([*error.allowed, *(["HEAD"] if "GET" in error.allowed else [])])
    return told


def rate_limits(levels: Iterable[QuotaLevel]) -> dict[str, str]:
    """The headers that OpenAI's clients know: of requests, and of tokens."""
    told: dict[str, str] = {}
    for level in levels:
        if (kind := _kind(level.quota)) is None:
            continue
        told[f"x-ratelimit-limit-{kind}"] = str(level.limit)
        told[f"x-ratelimit-remaining-{kind}"] = str(level.left)
        told[f"x-ratelimit-reset-{kind}"] = _duration(level.full_in_s)
    return told


def _kind(quota: str) -> str | None:
    """None: it counts neither requests nor tokens."""
    return _KINDS.get(quota.rpartition(".")[2])


def _duration(seconds: float) -> str:
    """As OpenAI writes them: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:g}s"


def _name(field: str, names: Names) -> str:
    if field in names:
        return names[field]
    for routers, callers in _ROUTERS_NAMES:
        if field.startswith(routers):
            field = callers + field[len(routers) :]
            break
    base = _BASE.match(field)
    assert base is not None, "it matches everything"
    return names.get(base[0], base[0]) + field[base.end() :]
