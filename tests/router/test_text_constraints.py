"""Constraints are looked at once, beside the loop and by tenant, in processes that end when they take long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from manylora_router.text import constraints
from manylora_router.text.constraints import NUM_PLACES, ConstraintCheck
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.errors import ServiceUnavailable

GOOD, BAD = Constraint(ConstraintKind.REGEX, "a+"), Constraint(ConstraintKind.REGEX, "(a")
# minutes: what is compiled grows with two to the power of these
PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}
SLOW = Constraint(ConstraintKind.GRAMMAR, f"start: %json {json.dumps(PATTERNS)}")


def _killed(checker: constraints._Checker, constraint: Constraint) -> None:
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._answer(30.0)


def pids(check: ConstraintCheck) -> list[int]:
    return [checker._process.pid for checker in check._all]


async def test_what_is_good_is_remembered_of_its_tenant() -> None:
    check = ConstraintCheck()
    assert await check.violation("acme", GOOD) is None
    found = await check.violation("acme", BAD)
    assert found is not None
    assert found.field == "constraint.regex"
    assert [check.is_known(*each) for each in (("acme", GOOD), ("acme", BAD), ("zoo", GOOD))] == [True, False, False]
    assert len(pids(check)) == 1
    check.close()
    assert pids(check) == []


async def test_what_takes_long_is_refused_and_nothing_of_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_SECONDS", 0.3)
    check = ConstraintCheck()
    found = await asyncio.gather(*(check.violation("acme", SLOW) for _ in range(NUM_PLACES)))
    assert [each and each.description for each in found] == ["takes longer than 0.3 s to compile"] * NUM_PLACES
    assert pids(check) == []
    assert await check.violation("zoo", GOOD) is None
    check.close()


async def test_a_place_is_held_until_its_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_SECONDS", 0.5)
    check = ConstraintCheck()
    assert await check.violation("acme", GOOD) is None  # the process has started
    left = asyncio.ensure_future(check.violation("acme", SLOW))
    await asyncio.sleep(0.1)
    left.cancel()
    await asyncio.sleep(0.1)
    assert not left.done()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert pids(check) == []
    check.close()


async def test_processes_that_died_while_they_were_idle_are_nobodys_fault() -> None:
    check = ConstraintCheck()
    slow = Constraint(ConstraintKind.REGEX, "(a|b){1,2000}")
    await asyncio.gather(*(check.violation("acme", each) for each in (slow, GOOD)))
    for pid in pids(check):
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await check.violation("zoo", GOOD) is None
    check.close()


async def test_a_process_that_gets_no_time_is_no_fault_of_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    check = ConstraintCheck()
    assert await check.violation("acme", GOOD) is None
    monkeypatch.setattr(constraints, "_MAX_WALL_S", 0.3)
    os.kill(pids(check)[0], signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable, match="had the time"):
        await check.violation("zoo", GOOD)
    assert pids(check) == []
    check.close()


async def test_a_process_that_somebody_ends_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check = ConstraintCheck()
    assert await check.violation("acme", GOOD) is None
    os.kill(pids(check)[0], signal.SIGKILL)
    assert await check.violation("zoo", GOOD) is None
    monkeypatch.setattr(constraints._Checker, "ask", _killed)
    found = await check.violation("acme", SLOW)
    assert found is not None
    assert "MiB of memory" in found.description
    assert pids(check) == []
    monkeypatch.setattr(constraints._Checker, "ask", lambda checker, constraint: json.loads("no sense"))
    with pytest.raises(ValueError, match="Expecting value"):
        await check.violation("acme", SLOW)
    assert pids(check) == []
    check.close()


async def test_where_none_can_start_the_service_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "python_environment", dict)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    check = ConstraintCheck()
    with pytest.raises(ServiceUnavailable, match="does not start"):
        await check.violation("acme", GOOD)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(ServiceUnavailable, match="No such file"):
        await check.violation("acme", GOOD)
    check.close()
    with pytest.raises(RuntimeError):
        await check.violation("acme", GOOD)


def test_a_router_ends_beside_a_slow_one() -> None:
    """It would wait for a thread that compiles."""
    script = f"""
import asyncio
from manylora_router.text.constraints import ConstraintCheck
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
async def main():
    check = ConstraintCheck()
    asking = asyncio.ensure_future(check.violation("acme", Constraint(ConstraintKind.GRAMMAR, {SLOW.source!r})))
    await asyncio.sleep(0.5)
    check.close()
    print([checker._process.poll() is not None for checker in check._all])
    print((await asyncio.gather(asking, return_exceptions=True))[0])
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert time.monotonic() - begun < 30.0
    assert done.stdout.startswith("[True]"), done
