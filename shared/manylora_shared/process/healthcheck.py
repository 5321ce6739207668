"""The containers' health check. Exits with 0 where the server serves (--alive: answers), 1 where not, 2 on misuse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from manylora_shared.transport.tls import Tls, TlsFiles


def check(address: str, timeout_s: float, tls: Tls | None = None) -> str:
    """Raises grpc.RpcError."""
    dialled = grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, tls.channel_credentials())
    with dialled as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s, wait_for_ready=True)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manylora_shared.process.healthcheck", description="Asks a server whether it serves."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--alive", action="store_true", help="any answer will do: a server that drains is alive")
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help="as the service's own")
    arguments = parser.parse_args(argv)
    files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    try:
        answer = check(arguments.address, arguments.timeout, Tls(files) if files.all else None)
    except grpc.RpcError as error:
        print(f"{arguments.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    if answer != "SERVING" and not arguments.alive:
        print(f"{arguments.address}: {answer}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
