"""Everything that can go wrong with a request, as one tree of exceptions.

    ManyloraError                     has one gRPC code, one HTTP answer and one low-cardinality label
    |-- Rejected                      before the request was queued: nothing was done, nothing is owed
    |   |-- InvalidRequest            INVALID_ARGUMENT     the request is wrong whatever the state (field violations)
    |   |-- NotFound                  NOT_FOUND            tenant or adapter; foreign and absent answer alike
    |   |-- AlreadyExists             ALREADY_EXISTS
    |   |-- VersionConflict           ABORTED              somebody else changed it since the caller looked
    |   |-- Unready                   FAILED_PRECONDITION  right request, wrong state
    |   |-- Overloaded                RESOURCE_EXHAUSTED   the cluster's own caps; may carry a retry hint
    |   |-- QuotaExceeded             RESOURCE_EXHAUSTED   the tenant's quotas; no hint where it can never fit
    |   |-- CircuitOpen               UNAVAILABLE          its tenant's or adapter's requests have kept failing
    |   |-- Quarantined               FAILED_PRECONDITION  the same request was there at every failure of workers
    |   |-- Unauthenticated           UNAUTHENTICATED      no valid key; missing, unknown and revoked answer alike
    |   `-- PermissionDenied          PERMISSION_DENIED    a valid key, of which this call needs more
    `-- Interrupted                   after it was queued
        |-- WorkerLost                UNAVAILABLE
        |-- ServiceUnavailable        UNAVAILABLE          a service that the request needs cannot be reached
        |-- DeadlineExceeded          DEADLINE_EXCEEDED
        |-- Cancelled                 CANCELLED
        |-- AdapterFailed             FAILED_PRECONDITION  the adapter's weights could not be loaded
        |-- QuotaExhausted            RESOURCE_EXHAUSTED   the tenant's tokens ran out while the answer streamed
        |-- SlowReader                RESOURCE_EXHAUSTED   the caller did not read its stream
        `-- InternalError             INTERNAL

Programmer errors are asserts, not members of this tree. Only the transport and the fronts turn them into wire formats.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Code(enum.IntEnum):
    """gRPC status codes, by number, so that pure code can name them."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class HttpError(NamedTuple):
    """How an error answers over HTTP."""

    status: int
    type: str
    """`error.type` of the body, in OpenAI's words."""


HTTP_OF_CODE: Mapping[Code, HttpError] = {
    Code.CANCELLED: HttpError(499, "cancelled_error"),
    Code.UNKNOWN: HttpError(500, "server_error"),
    Code.INVALID_ARGUMENT: HttpError(400, "invalid_request_error"),
    Code.DEADLINE_EXCEEDED: HttpError(504, "timeout_error"),
    Code.NOT_FOUND: HttpError(404, "not_found_error"),
    Code.ALREADY_EXISTS: HttpError(409, "conflict_error"),
    Code.PERMISSION_DENIED: HttpError(403, "permission_error"),
    Code.RESOURCE_EXHAUSTED: HttpError(429, "rate_limit_error"),
    Code.FAILED_PRECONDITION: HttpError(400, "invalid_request_error"),
    Code.ABORTED: HttpError(409, "conflict_error"),
    Code.OUT_OF_RANGE: HttpError(400, "invalid_request_error"),
    Code.UNIMPLEMENTED: HttpError(501, "server_error"),
    Code.INTERNAL: HttpError(500, "server_error"),
    Code.UNAVAILABLE: HttpError(503, "server_error"),
    Code.DATA_LOSS: HttpError(500, "server_error"),
    Code.UNAUTHENTICATED: HttpError(401, "authentication_error"),
}
"""The answer of every error that has none of its own (`ManyloraError.own_http`)."""


def retry_after_header(retry_after_s: float | None) -> str | None:
    """The value of Retry-After: whole seconds, rounded up, one at least; None where there is no hint."""
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


MAX_SHOWN = 80
"""Characters of a caller's text that a message repeats."""


def shown(text: str) -> str:
    """A caller's text for a message: quoted, and cut."""
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


@dataclass(frozen=True)
class FieldViolation:
    """One reason why a request is wrong: the field's path (`sampling.top_p`) and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True)
class QuotaBreach:
    """One quota that a request does not fit into."""

    quota: str
    """Its path in the tenant's policy: `classes.batch.token_bucket`, `quotas.concurrency`."""
    tenant_id: str
    limit: int
    """In the quota's own unit; of a bucket its rate a second."""
    description: str


class ManyloraError(Exception):
    """Base of the tree.

    Args:
        message: what is wrong and where, for the caller to read.
        violations: the fields at fault, where fields are (google.rpc.BadRequest on the wire).
        retry_after_s: when trying again may help (google.rpc.RetryInfo on the wire); None where it cannot.
        breaches: the quotas at fault, where quotas are (google.rpc.QuotaFailure on the wire).
    """

    code: Code = Code.INTERNAL
    label: str = "internal"
    own_http: HttpError | None = None
    """Where its code's answer would mislead."""

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        breaches: Sequence[QuotaBreach] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.breaches = tuple(breaches)

    @property
    def http(self) -> HttpError:
        return self.own_http or HTTP_OF_CODE[self.code]


class Rejected(ManyloraError):
    pass


class InvalidRequest(Rejected):
    code = Code.INVALID_ARGUMENT
    label = "invalid"

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """The error for one bad field."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])

    @classmethod
    def of_all(cls, violations: Sequence[FieldViolation]) -> InvalidRequest:
        """One error for several bad fields; `violations` is not empty."""
        assert violations
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)


class NotFound(Rejected):
    code = Code.NOT_FOUND
    label = "not_found"


class AlreadyExists(Rejected):
    code = Code.ALREADY_EXISTS
    label = "already_exists"


class VersionConflict(Rejected):
    code = Code.ABORTED
    label = "version_conflict"


class Unready(Rejected):
    code = Code.FAILED_PRECONDITION
    label = "unready"


class Overloaded(Rejected):
    code = Code.RESOURCE_EXHAUSTED
    label = "overloaded"
    own_http = HttpError(503, "overloaded_error")


class QuotaExceeded(Rejected):
    code = Code.RESOURCE_EXHAUSTED
    label = "quota_exceeded"


class CircuitOpen(Rejected):
    code = Code.UNAVAILABLE
    label = "circuit_open"


class Quarantined(Rejected):
    code = Code.FAILED_PRECONDITION
    label = "quarantined"


class Unauthenticated(Rejected):
    code = Code.UNAUTHENTICATED
    label = "unauthenticated"


class PermissionDenied(Rejected):
    code = Code.PERMISSION_DENIED
    label = "permission_denied"


class Interrupted(ManyloraError):
    pass


class WorkerLost(Interrupted):
    code = Code.UNAVAILABLE
    label = "worker_lost"


class ServiceUnavailable(Interrupted):
    code = Code.UNAVAILABLE
    label = "unavailable"


class DeadlineExceeded(Interrupted):
    code = Code.DEADLINE_EXCEEDED
    label = "deadline_exceeded"


class Cancelled(Interrupted):
    code = Code.CANCELLED
    label = "cancelled"


class AdapterFailed(Interrupted):
    code = Code.FAILED_PRECONDITION
    label = "adapter_failed"


class QuotaExhausted(Interrupted):
    code = Code.RESOURCE_EXHAUSTED
    label = "quota_exhausted"


class SlowReader(Interrupted):
    code = Code.RESOURCE_EXHAUSTED
    label = "slow_reader"
    own_http = HttpError(408, "timeout_error")


class InternalError(Interrupted):
    code = Code.INTERNAL
    label = "internal"


class RpcError(ManyloraError):
    """What a client of the transport sees when a call ends with a status other than OK.

    `violations` and `retry_after_s` come from the google.rpc details of the status, where the server sent them.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        breaches: Sequence[QuotaBreach] = (),
    ) -> None:
        super().__init__(message, violations=violations, retry_after_s=retry_after_s, breaches=breaches)
        self.code = code
        self.label = code.name.lower()

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"
