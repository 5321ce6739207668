"""Services keep gRPC's sockets with the thread that tells the event loop (docs/decisions/0031)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from manylora_shared.transport.grpc_polling import EXPERIMENTS

FIRST_IMPORT = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            found.append(os.environ.get("{variable}", "nothing"))

found = []
sys.meta_path.insert(0, Watch())
importlib.import_module("{module}")
print(*found[:1])
"""

CALLS = """
import {first}
import asyncio, os
import grpc

async def answer(request, context):
    return request

async def main():
    handlers = grpc.method_handlers_generic_handler("a.B", {{"C": grpc.unary_unary_rpc_method_handler(answer)}})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handlers])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        for _ in range(300):
            await channel.unary_unary("/a.B/C")(b"1")
    switches = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{{thread}}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        if status["Name"].strip() == "event_engine":
            switches += int(status["voluntary_ctxt_switches"])
    print(switches)
    await server.stop(0)

asyncio.run(main())
"""


def run(program: str, **environment: str) -> str:
    without = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=without | environment, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.parametrize("service", ["router", "scheduler", "worker"])
def test_a_service_says_so_before_grpc_is_imported(service: str) -> None:
    found = run(FIRST_IMPORT.format(variable=EXPERIMENTS, module=f"manylora_{service}.__main__"))
    assert "-event_engine_listener" in found.split(",")


def test_what_the_operator_says_stays() -> None:
    program = FIRST_IMPORT.format(variable=EXPERIMENTS, module="manylora_router.__main__")
    assert run(program, **{EXPERIMENTS: "-monitoring_experiment"}) == "-monitoring_experiment"


def test_a_library_does_not() -> None:
    assert run(FIRST_IMPORT.format(variable=EXPERIMENTS, module="manylora.client")) == "nothing"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts what the kernel tells of threads")
def test_no_call_wakes_a_thread_beside_the_one_that_tells_the_loop() -> None:
    assert (
        int(run(CALLS.format(first="manylora_shared.transport.grpc_polling")))
        < 300
        < int(run(CALLS.format(first="os")))
    )
