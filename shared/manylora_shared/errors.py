"""Everything that can go wrong with a request, as one tree of exceptions."""

# ManyloraError
# |-- Rejected                      before the request was queued: nothing was done, nothing is owed
# |   |-- InvalidRequest            whatever the state
# |   |   `-- KeyReused             another request had this idempotency key
# |   |-- NotFound                  foreign and absent answer alike
# |   |-- AlreadyExists
# |   |-- VersionConflict           somebody else changed it since the caller looked
# |   |-- AnsweredElsewhere         another router has this idempotency key
# |   |-- AnswerLost                this idempotency key's work is done or begun, and its answer is gone
# |   |-- Unready                   right request, wrong state
# |   |   |-- NoChatTemplate        messages, to a model that has no template for them
# |   |   `-- AdapterRejected       by the quality gate of its tenant's policy
# |   |-- Overloaded                the cluster's own caps
# |   |-- QuotaExceeded             the tenant's; no retry hint where it can never fit
# |   |-- CircuitOpen               its tenant's or adapter's requests have kept failing
# |   |-- Quarantined               the same prompt was there at every failure of workers
# |   |-- Unauthenticated           missing and unknown keys answer alike
# |   `-- PermissionDenied          a valid key, of which this call needs more
# `-- Interrupted                   after it was queued
#     |-- WorkerLost
#     |-- ServiceUnavailable        one that the request needs
#     |   |-- AdapterUnavailable    its store, or its worker's disk, cannot give it now
#     |   |-- Draining              the router itself stops: another one takes the request, or goes on with it
#     |   `-- GateInconclusive      the quality gate could not judge the adapter
#     |-- DeadlineExceeded
#     |-- Cancelled
#     |-- AdapterFailed             its weights do not load, or overflow
#     |-- QuotaExhausted            the tokens ran out while the answer streamed
#     |-- SlowReader
#     |-- DataLost                  what is stored is not what was put there
#     `-- InternalError

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


class Code(enum.IntEnum):
    """gRPC's, by number, so that pure code can name them."""

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
    status: int
    type: str  # in OpenAI's words


# of every error without its own (`own_http`)
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


def retry_after_header(retry_after_s: float | None) -> str | None:
    """Whole seconds, rounded up, one at least."""
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


MAX_SHOWN = 80


def shown(text: str) -> str:
    """A caller's text for a message: quoted, and cut."""
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


@dataclass(frozen=True)
class FieldViolation:
    """`field` is its path: `sampling.top_p`."""

    field: str
    description: str


@dataclass(frozen=True)
class QuotaBreach:
    quota: str  # its path in the policy: `classes.batch.token_bucket`
    tenant_id: str
    limit: int  # in the quota's own unit; of a bucket its rate a second
    description: str
    capacity: int = 0  # of a bucket: the most that it holds


class ManyloraError(Exception):
    """Args:
    message: for the caller to read.
    violations: google.rpc.BadRequest on the wire.
    retry_after_s: google.rpc.RetryInfo; None: trying again cannot help.
    breaches: google.rpc.QuotaFailure."""

    code: Code = Code.INTERNAL
    label: str = "internal"
    own_http: HttpError | None = None  # where its code's answer would mislead

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
    def of(cls, field: str, description: str) -> Self:
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])

    @classmethod
    def of_all(cls, violations: Sequence[FieldViolation]) -> Self:
        """`violations` is not empty."""
        assert violations
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)


class KeyReused(InvalidRequest):
    label = "idempotency_key_reused"
    own_http = HttpError(422, "invalid_request_error")


class NotFound(Rejected):
    code = Code.NOT_FOUND
    label = "not_found"


class AlreadyExists(Rejected):
    code = Code.ALREADY_EXISTS
    label = "already_exists"


class VersionConflict(Rejected):
    code = Code.ABORTED
    label = "version_conflict"


class AnsweredElsewhere(Rejected):
    code = Code.ABORTED
    label = "answered_elsewhere"


class AnswerLost(Rejected):
    code = Code.ABORTED
    label = "answer_lost"


class Unready(Rejected):
    code = Code.FAILED_PRECONDITION
    label = "unready"


class NoChatTemplate(Unready):
    label = "no_chat_template"


class AdapterRejected(Unready):
    label = "adapter_rejected"


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


class AdapterUnavailable(ServiceUnavailable):
    label = "adapter_unavailable"


class Draining(ServiceUnavailable):
    label = "draining"


class GateInconclusive(ServiceUnavailable):
    label = "gate_inconclusive"


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


class DataLost(Interrupted):
    code = Code.DATA_LOSS
    label = "data_lost"


class InternalError(Interrupted):
    code = Code.INTERNAL
    label = "internal"


class RpcError(ManyloraError):
    """What a client of the transport sees when a call does not end with OK."""

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
