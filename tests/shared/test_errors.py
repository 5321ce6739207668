"""Every error answers over gRPC and over HTTP, and both say the same kind of thing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manylora_shared.errors import (
    HTTP_OF_CODE,
    Code,
    HttpError,
    Interrupted,
    ManyloraError,
    Overloaded,
    QuotaExceeded,
    Rejected,
    RpcError,
    retry_after_header,
)

STATUSES: dict[Code, set[int]] = {
    Code.CANCELLED: {499},
    Code.UNKNOWN: {500},
    Code.INVALID_ARGUMENT: {400, 422},
    Code.DEADLINE_EXCEEDED: {504},
    Code.NOT_FOUND: {404},
    Code.ALREADY_EXISTS: {409},
    Code.PERMISSION_DENIED: {403},
    Code.RESOURCE_EXHAUSTED: {408, 429, 503},
    Code.FAILED_PRECONDITION: {400, 500},
    Code.ABORTED: {409},
    Code.OUT_OF_RANGE: {400},
    Code.UNIMPLEMENTED: {501},
    Code.INTERNAL: {500},
    Code.UNAVAILABLE: {503},
    Code.DATA_LOSS: {500},
    Code.UNAUTHENTICATED: {401},
}
TYPES = {
    400: {"invalid_request_error"},
    401: {"authentication_error"},
    403: {"permission_error"},
    404: {"not_found_error"},
    408: {"timeout_error"},
    409: {"conflict_error"},
    422: {"invalid_request_error"},
    429: {"rate_limit_error"},
    499: {"cancelled_error"},
    500: {"server_error"},
    501: {"server_error"},
    503: {"server_error", "overloaded_error"},
    504: {"timeout_error"},
}


def tree(cls: type[ManyloraError]) -> Iterator[type[ManyloraError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from tree(child)


ERRORS = [c for c in tree(ManyloraError) if c is not RpcError and c.__module__ == ManyloraError.__module__]


def agrees(error: ManyloraError) -> bool:
    return error.http.status in STATUSES[error.code] and error.http.type in TYPES[error.http.status]


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_has_both_answers_and_they_agree(cls: type[ManyloraError]) -> None:
    error = cls("why")
    assert isinstance(error.code, Code)
    assert error.code is not Code.OK
    assert agrees(error)
    assert cls in (ManyloraError, Rejected, Interrupted) or "label" in vars(cls)


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_what_another_service_answered_has_an_http_answer_too(code: Code) -> None:
    assert agrees(RpcError(code, "why"))


def test_success_is_no_error() -> None:
    assert Code.OK not in HTTP_OF_CODE


def test_the_clusters_overload_is_no_tenants_rate_limit() -> None:
    assert Overloaded("full").http == HttpError(503, "overloaded_error")
    assert QuotaExceeded("too much").http == HttpError(429, "rate_limit_error")


@pytest.mark.parametrize(
    ("retry_after_s", "header"), [(None, None), (0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30.0, "30")]
)
def test_a_retry_hint_is_whole_seconds_and_never_too_few(retry_after_s: float | None, header: str | None) -> None:
    assert retry_after_header(retry_after_s) == header
