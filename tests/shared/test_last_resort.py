"""A process ends although its interpreter, or its end, hangs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

SILENT = """
import asyncio, ctypes, sys
from manylora_shared.process import last_resort
last_resort._BEAT_S = 0.05

async def main():
    last_resort.LastResort(0.5).start()
    await asyncio.sleep(1)  # longer than it may be silent
    print("beats", flush=True)
    ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock

asyncio.run(main())
"""
ENDING = """
import asyncio, threading
from manylora_shared.process import last_resort
last_resort._END_S = 0.3

async def main():
    resort = last_resort.LastResort(60)
    resort.start()
    print("beats", flush=True)
    resort.end_soon()
    await asyncio.to_thread(threading.Event().wait)

asyncio.run(main())
"""


@pytest.mark.parametrize("code", [SILENT, ENDING])
def test_what_hangs_is_ended_with_its_threads_stacks(code: str) -> None:
    began_s = time.monotonic()
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert process.returncode == 1
    assert process.stdout == "beats\n"
    assert "most recent call first" in process.stderr
    assert time.monotonic() - began_s < 15
