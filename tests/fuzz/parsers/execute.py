"""An ExecuteRequest, as a worker gets it: it believes nobody."""

from __future__ import annotations

from manylora.v1 import worker_pb2
from manylora_shared.transport.handling import parse_request
from manylora_worker.models.parts import ModelInfo
from manylora_worker.serving.wire import engine_request

from tests.fuzz.harness import Harness

MODEL = ModelInfo("tiny", "d" * 64, "cpu", 131, 256, (2,), 1024)


def run(data: bytes) -> None:
    message = parse_request(worker_pb2.ExecuteRequest, data)
    assert isinstance(message, worker_pb2.ExecuteRequest)
    engine_request(message, MODEL)


HARNESS = Harness(run)
