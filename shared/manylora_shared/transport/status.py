"""google.rpc.Status: a ManyloraError's fields in the `grpc-status-details-bin` trailer, and back.

Owns their bounds: a peer refuses trailers over its metadata limit, and the caller would see that instead of the error.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from manylora_shared.errors import Code, FieldViolation, ManyloraError, QuotaBreach, RpcError

DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "manylora"
MAX_MESSAGE_CHARS = 1024
MAX_VIOLATIONS_BYTES = 4096
_NANOS = 1_000_000_000
_TENANT = "tenant:"
_CAPACITY = "capacity"


def message_of(error: ManyloraError) -> str:
    told = error.message
    return _sendable(told if len(told) <= MAX_MESSAGE_CHARS else told[: MAX_MESSAGE_CHARS - 3] + "...")


def _sendable(text: str) -> str:
    # what is wrong may be half a character, which no message carries
    return text.encode(errors="backslashreplace").decode()


def encode_details(error: ManyloraError) -> bytes:
    """ErrorInfo always, with the quotas for readers of no other detail; BadRequest, QuotaFailure, RetryInfo as they
    apply.
    """
    status = status_pb2.Status(code=int(error.code), message=message_of(error))
    info = error_details_pb2.ErrorInfo(reason=error.label.upper(), domain=ERROR_DOMAIN)
    if error.breaches:
        info.metadata["tenant"] = error.breaches[0].tenant_id
        info.metadata["quotas"] = ",".join(breach.quota for breach in error.breaches)
    status.details.add().Pack(info)
    if error.breaches:
        violations = [
            error_details_pb2.QuotaFailure.Violation(
                subject=f"{_TENANT}{breach.tenant_id}",
                description=breach.description[:MAX_MESSAGE_CHARS],
                quota_id=breach.quota,
                quota_value=breach.limit,
                quota_dimensions={_CAPACITY: str(breach.capacity)} if breach.capacity else None,
            )
            for breach in error.breaches
        ]
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=violations))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        budget_bytes = MAX_VIOLATIONS_BYTES
        for violation in error.violations:
            item = error_details_pb2.BadRequest.FieldViolation(
                field=_sendable(violation.field[:MAX_MESSAGE_CHARS]),
                description=_sendable(violation.description[:MAX_MESSAGE_CHARS]),
            )
            budget_bytes -= item.ByteSize()
            if budget_bytes < 0 and bad_request.field_violations:
                break
            bad_request.field_violations.append(item)
        status.details.add().Pack(bad_request)
    if error.retry_after_s is not None:
        nanos = round(error.retry_after_s * _NANOS)
        delay = Duration(seconds=nanos // _NANOS, nanos=nanos % _NANOS)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    encoded: bytes = status.SerializeToString()
    return encoded


def decode_error(code: Code, message: str, details: bytes | None) -> RpcError:
    """Details that do not parse are another server's: the status stands alone."""
    status = status_pb2.Status()
    violations: list[FieldViolation] = []
    breaches: list[QuotaBreach] = []
    retry_after_s: float | None = None
    label: str | None = None
    try:
        status.ParseFromString(details or b"")
        for detail in status.details:
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad_request = error_details_pb2.BadRequest()
                detail.Unpack(bad_request)
                violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
            elif detail.Is(error_details_pb2.QuotaFailure.DESCRIPTOR):
                failure = error_details_pb2.QuotaFailure()
                detail.Unpack(failure)
                breaches += map(_breach_of, failure.violations)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / _NANOS
            elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                if info.domain == ERROR_DOMAIN:
                    label = info.reason.lower()
    except DecodeError:
        violations, breaches, retry_after_s, label = [], [], None, None
    error = RpcError(code, message, violations=violations, retry_after_s=retry_after_s, breaches=breaches)
    if label is not None:
        error.label = label
    return error


def _breach_of(told: error_details_pb2.QuotaFailure.Violation) -> QuotaBreach:
    capacity = told.quota_dimensions.get(_CAPACITY, "")
    is_number = capacity.isdecimal() and len(capacity) < 20
    return QuotaBreach(
        told.quota_id,
        told.subject.removeprefix(_TENANT),
        told.quota_value,
        told.description,
        int(capacity) if is_number else 0,
    )
