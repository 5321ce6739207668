"""A Generate request as it comes from the wire, through admission, templates and tokenizer to its answer."""

from __future__ import annotations

from manylora.v1 import inference_pb2
from manylora_shared.transport.handling import parse_request

from tests.fuzz.harness import Harness
from tests.fuzz.router import asked


def run(data: bytes) -> None:
    request = parse_request(inference_pb2.GenerateRequest, data)
    assert isinstance(request, inference_pb2.GenerateRequest)
    asked(request, {})


HARNESS = Harness(run)
