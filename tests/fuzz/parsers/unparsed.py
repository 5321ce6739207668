"""What is told of a Generate request's bytes before they are parsed, against what protobuf makes of them."""

from __future__ import annotations

from manylora.v1 import inference_pb2
from manylora_shared.errors import InvalidRequest
from manylora_shared.transport.handling import parse_request
from manylora_shared.transport.unparsed import check_fields, too_large

from tests.fuzz.harness import Finding, Harness

_TYPE = inference_pb2.GenerateRequest


def run(data: bytes) -> None:
    too_large(_TYPE, data, 1)
    message = parse_request(_TYPE, data)
    message.DiscardUnknownFields()  # among which are groups, that no message here has
    known = message.SerializeToString()
    try:
        check_fields(_TYPE, known, len(known))
    except InvalidRequest as error:
        raise Finding(f"a message is refused: {error.message}") from error
    check_fields(_TYPE, data, len(data))


HARNESS = Harness(run)
