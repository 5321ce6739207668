"""Supervised children, with small scripts in the place of services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from manylora.local import child as child_module
from manylora.local import log_file
from manylora.local.child import Child, ChildFailed

READY = 'import sys; print(\'{"ready": true, "address": "\' + sys.argv[1] + \'"}\', flush=True); '
SERVE = READY + "import time; time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE
Make = Callable[..., Child]


@pytest.fixture
async def lines() -> list[str]:
    return []


@pytest.fixture
async def make(tmp_path: Path, lines: list[str]) -> AsyncIterator[Make]:
    made: list[Child] = []

    def build(script: str, *, start_timeout_s: float = 20.0, **options: Any) -> Child:
        def command(ready: Mapping[str, Any]) -> list[str]:
            return [sys.executable, "-c", script, str(ready.get("address", "first") + "+")]

        child = Child(
            "svc",
            command,
            log_path=tmp_path / "svc.log",
            notify=lines.append,
            start_timeout_s=start_timeout_s,
            **options,
        )
        made.append(child)
        return child

    yield build
    for child in made:
        await child.stop(0)


async def test_a_child_is_ready_when_it_says_so_and_the_rest_is_logged(make: Make) -> None:
    child = make("print('noise'); print('{\"ready\": 1}'); import sys; print('oops', file=sys.stderr); " + SERVE)
    await child.start()
    assert child.ready == {"ready": True, "address": "first+"}
    log = child.log.path.read_text()
    assert "noise" in log
    assert "oops" in log
    pid = child.pid
    await child.stop(5)
    assert not is_alive(pid)


async def test_a_child_that_dies_at_its_start_shows_its_last_words(make: Make) -> None:
    child = make("import sys; sys.exit('no such model')")
    with pytest.raises(ChildFailed, match=r"svc ended with exit code 1; the end of .*svc.log:\nno such model"):
        await child.start()


async def test_the_last_words_are_not_those_of_an_earlier_start(make: Make) -> None:
    for words in ("of the first", "of the second"):
        child = make(f"import sys; sys.exit('{words}')")
        with pytest.raises(ChildFailed) as error:
            await child.start()
    assert str(error.value).endswith("svc.log:\nof the second")


async def test_the_last_line_of_a_failed_start_is_the_reason(make: Make) -> None:
    script = """
import json, sys
for level, message, more in [
    ("info", "the model runs on cpu", {}),
    ("error", "cannot run: weights:\\n cut short", {"exception": "Traceback\\nValueError: 7"}),
    ("warning", "scheduler stream ended", {"address": "host:1"}),
]:
    print(json.dumps({"time": "now", "level": level, "service": "svc", "logger": "l", "message": message, **more}))
    print("no line of a log", file=sys.stderr)
sys.exit(1)
"""
    with pytest.raises(ChildFailed) as error:
        await make(script).start()
    shown = str(error.value).partition("svc.log:\n")[2].splitlines()
    assert shown[-1] == "error: cannot run: weights: cut short ValueError: 7"
    assert "info: the model runs on cpu" in shown
    assert "scheduler stream ended" not in str(error.value)


async def test_what_is_ended_at_once_is_not_started_again(make: Make, lines: list[str]) -> None:
    child = make(STUBBORN)
    await child.start()
    child.end_at_once()
    await child.stop(60)
    assert (lines, child.starts) == ([], 1)


async def test_a_childs_log_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_BYTES", 1000)
    monkeypatch.setattr(child_module, "LOG_LOOK_S", 0.01)
    kept = (b"x" * 99 + b"\n") * 10
    child = make(READY + "import os, time\nos.write(1, (b'x' * 99 + b'\\n') * 2000)\ntime.sleep(60)")
    await child.start()
    # It may be looked at in the midst of the write, and is then bounded twice.
    await until(lambda: child.log.older.exists() and child.log.older.read_bytes() == kept)
    await until(lambda: child.log_tail() == "")


async def test_a_child_that_is_never_ready_is_ended(make: Make) -> None:
    child = make("import time; time.sleep(60)", start_timeout_s=0.3)
    with pytest.raises(ChildFailed, match=r"was not ready after 0.3 s"):
        await child.start()
    assert not is_alive(child.pid)


async def test_a_probe_takes_the_place_of_the_line(make: Make) -> None:
    answers = iter([False, False, True])

    async def probe() -> bool:
        return next(answers)

    child = make("import time; time.sleep(60)", probe=probe)
    await child.start()
    assert list(answers) == []


async def test_a_killed_child_is_started_again_with_what_it_had_reported(make: Make, lines: list[str]) -> None:
    child = make(SERVE)
    await child.start()
    first_pid = child.pid
    os.kill(first_pid, signal.SIGKILL)
    await until(lambda: child.starts == 2 and child.ready["address"] == "first++")
    await until(lambda: len(lines) == 2)
    assert lines == [
        f"svc (pid {first_pid}) was ended by SIGKILL; it is started again",
        f"svc serves again (pid {child.pid})",
    ]
    await child.stop(5)
    await asyncio.sleep(0.3)
    assert child.starts == 2


async def test_a_child_that_ignores_sigterm_is_killed(make: Make) -> None:
    child = make(STUBBORN)
    await child.start()
    await asyncio.wait_for(child.stop(0.2), 5)
    assert not is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is the kernel's")
async def test_a_child_hears_no_ctrl_c(make: Make) -> None:
    child = make(SERVE)
    await child.start()
    assert os.getpgid(child.pid) == child.pid


def is_alive(pid: int) -> bool:
    """A zombie, which nobody has reaped yet, is dead."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)
