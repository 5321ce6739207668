"""Errors in a status's details, and back."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2, status_pb2
from manylora_shared.errors import Code, FieldViolation, InvalidRequest, Overloaded, QuotaBreach, QuotaExceeded
from manylora_shared.transport.status import (
    MAX_MESSAGE_CHARS,
    MAX_VIOLATIONS_BYTES,
    decode_error,
    encode_details,
    message_of,
)


def test_what_an_error_says_arrives() -> None:
    breaches = [QuotaBreach("quotas.x", "acme", 5, "too much")]
    sent = QuotaExceeded("m", retry_after_s=1.25, breaches=breaches)
    found = decode_error(sent.code, "m", encode_details(sent))
    assert (found.code, found.message, found.label) == (sent.code, "m", sent.label)
    assert (found.retry_after_s, list(found.breaches)) == (1.25, breaches)
    invalid = InvalidRequest.of_all([FieldViolation("a", "b"), FieldViolation("c", "d")])
    assert list(decode_error(invalid.code, "", encode_details(invalid)).violations) == list(invalid.violations)
    assert decode_error(Code.RESOURCE_EXHAUSTED, "", encode_details(Overloaded("m"))).retry_after_s is None


def test_halves_of_characters_are_told_as_they_are_written() -> None:
    sent = InvalidRequest.of("a\ud800", "b\udfff")
    assert message_of(sent) == r"a\ud800: b\udfff"
    assert list(decode_error(sent.code, "", encode_details(sent)).violations) == [
        FieldViolation(r"a\ud800", r"b\udfff")
    ]


def test_long_texts_and_many_violations_stay_within_what_a_peer_takes() -> None:
    sent = InvalidRequest.of_all([FieldViolation(f"field{i}", "x" * 900) for i in range(50)])
    assert len(message_of(sent)) == MAX_MESSAGE_CHARS
    assert message_of(sent).endswith("...")
    details = encode_details(sent)
    assert len(details) < MAX_VIOLATIONS_BYTES + 2 * MAX_MESSAGE_CHARS
    told = decode_error(sent.code, "", details).violations
    assert 1 <= len(told) < 50
    assert told[0].field == "field0"


def test_one_violation_is_told_however_long_it_is() -> None:
    sent = InvalidRequest.of("f" * 5000, "d" * 5000)
    (told,) = decode_error(sent.code, "", encode_details(sent)).violations
    assert (len(told.field), len(told.description)) == (MAX_MESSAGE_CHARS, MAX_MESSAGE_CHARS)


@pytest.mark.parametrize("details", [None, b"", b"\xff\xff\xff"])
def test_details_that_are_none_leave_the_status_alone(details: bytes | None) -> None:
    found = decode_error(Code.UNAVAILABLE, "gone", details)
    assert (found.code, found.message, list(found.violations), found.retry_after_s) == (
        Code.UNAVAILABLE,
        "gone",
        [],
        None,
    )


def test_the_reason_of_another_domain_is_not_ours() -> None:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="example.com"))
    theirs = decode_error(Code.RESOURCE_EXHAUSTED, "m", status.SerializeToString())
    ours = decode_error(Code.RESOURCE_EXHAUSTED, "m", encode_details(Overloaded("m")))
    assert theirs.label != ours.label == Overloaded("m").label
