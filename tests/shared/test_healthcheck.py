from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from manylora_shared.process.healthcheck import main


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None)


def test_serving(server: tuple[str, health.HealthServicer]) -> None:
    address, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([address]) == 0


def test_not_serving(server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]) -> None:
    address, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([address]) == 1
    assert "NOT_SERVING" in capsys.readouterr().err
    assert main([address, "--alive"]) == 0


def test_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--timeout", "0.2"]) == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err
    assert main(["127.0.0.1:1", "--timeout", "0.2", "--alive"]) == 1
