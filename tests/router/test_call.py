"""A call's account: whatever way it ends, everything that counts it is told once."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from manylora_router.guard.admission import RequestInput
from manylora_router.guard.permits import Fault, Permit
from manylora_router.request.call import Call, CallCounters
from manylora_shared.errors import InternalError, Unready
from manylora_shared.telemetry import logs
from router_fakes import RouterCluster, plain_request, simulate


async def begun(cluster: RouterCluster) -> tuple[Call, list[Fault]]:
    """A call that stands before its first frame, and how its permit has ended, each time."""
    calls, intake = cluster.app.calls, cluster.app.intake
    request = await plain_request(cluster)
    call = calls.open(request, "acme").__enter__()
    job, permit = await intake.admit(request, "acme", call)
    ends: list[Fault] = []
    ended = calls.guard.ended

    def noted(permit: Permit, fault: Fault, now: float) -> object:
        ends.append(fault)
        return ended(permit, fault, now)

    calls.guard.ended = noted  # type: ignore[assignment, method-assign]
    call.begin(job, permit)
    return call, ends


async def rest_of(call: Call) -> None:
    with contextlib.ExitStack() as stack:
        stack.push(call)
        while await call.advance():
            pass


def test_completed() -> None:
    async def test(cluster: RouterCluster) -> None:
        call, ends = await begun(cluster)
        assert list(cluster.app.calls.live) == [call.request_id]
        await rest_of(call)
        assert ends == [Fault.NONE]
        assert cluster.app.calls.counters == CallCounters(received=1, completed=1)
        assert cluster.app.calls.live == {}

    simulate(test)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_left_in_the_middle(error: BaseException) -> None:
    async def test(cluster: RouterCluster) -> None:
        call, ends = await begun(cluster)
        await call.advance()
        call.__exit__(type(error), error, None)
        assert ends == [Fault.NO_VERDICT]
        assert cluster.app.calls.counters == CallCounters(received=1, cancelled=1)

    simulate(test)


def test_refused_before_it_began() -> None:
    async def test(cluster: RouterCluster) -> None:
        calls = cluster.app.calls
        with pytest.raises(Unready), calls.open(await plain_request(cluster), "acme"):
            raise Unready("not now")
        assert calls.counters == CallCounters(received=1, rejected=1)

    simulate(test)


def test_what_nobody_foresaw_is_a_failure_and_frees_the_permit() -> None:
    async def test(cluster: RouterCluster) -> None:
        calls = cluster.app.calls
        request = await plain_request(cluster)

        def no_detokenizer(prompt_token_ids: object, skips_special: bool, kept: object) -> None:
            raise ZeroDivisionError

        async def read(request: RequestInput) -> None:
            with calls.open(request, "acme") as call:
                call.begin(*await cluster.app.intake.admit(request, "acme", call))

        calls.texts.default.detokenizer = no_detokenizer  # type: ignore[assignment, method-assign]
        with pytest.raises(ZeroDivisionError):
            await read(request)
        assert calls.counters == CallCounters(received=1, failed=1)
        assert calls.guard.num_running == 0

    simulate(test)


def test_a_bug_ends_the_request_as_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: RouterCluster) -> None:
        call, ends = await begun(cluster)
        assert call._execution is not None

        async def broken() -> None:
            raise ZeroDivisionError

        call._execution.advance = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(InternalError):
            await rest_of(call)
        assert ends == [Fault.INTERNAL]

    simulate(test)
    assert "ZeroDivisionError" in caplog.text
    (line,) = (record for record in caplog.records if "nobody foresaw" in record.getMessage())
    assert len(json.loads(logs.JsonFormatter("router").format(line))["trace_id"]) == 32
