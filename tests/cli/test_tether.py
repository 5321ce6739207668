"""A child ends with its parent, and becomes its command only while that is there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from manylora.local import tether

from tests.cli.test_child import SERVE, is_alive, until


async def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib, sys
from manylora.local.child import Child
async def main():
    command = [sys.executable, "-c", {SERVE!r}, "x"]
    child = Child("svc", lambda ready: command, log_path=pathlib.Path({str(tmp_path)!r}) / "log", notify=print,
                  start_timeout_s=20)
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid))


async def tethered(parent_pid: int, *command: str) -> int | None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", tether.__file__, str(parent_pid), *command), stderr=subprocess.DEVNULL
    )
    return await process.wait()


async def test_it_becomes_the_command() -> None:
    assert await tethered(os.getpid(), "sh", "-c", "exit 7") == 7


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is the kernel's")
async def test_where_the_parent_is_gone_the_command_does_not_begin() -> None:
    assert await tethered(os.getpid() + 1, "sh", "-c", "exit 7") == 1
