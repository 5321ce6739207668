"""A span: its times, its status, its end."""

from __future__ import annotations

import asyncio
import time

import pytest
from manylora_shared.errors import Code, NotFound
from manylora_shared.telemetry import Attribute, SpanName, Telemetry


def test_explicit_times_tell_of_the_past() -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.QUEUE_WAIT, start_ns=1_000).end(5_000)
    (span,) = telemetry.recorded()
    assert (span["start_ns"], span["end_ns"]) == (1_000, 5_000)
    before = time.time_ns()
    assert before <= telemetry.now_ns() <= time.time_ns()


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (NotFound("adapter x"), "NOT_FOUND: adapter x", "NOT_FOUND"),
        (asyncio.CancelledError(), "CANCELLED", "CANCELLED"),
        (KeyError("secret text"), "INTERNAL: KeyError", "INTERNAL"),
        (GeneratorExit(), "CANCELLED", "CANCELLED"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_sets_the_status(error: BaseException, message: str, kind: str) -> None:
    telemetry = Telemetry.recording("router")
    with pytest.raises(type(error)), telemetry.span(SpanName.REQUEST):
        raise error
    (span,) = telemetry.recorded()
    assert span["status"] == {"code": "ERROR", "message": message}
    assert span["attributes"][Attribute.ERROR_TYPE] == kind


def test_status_is_ok_on_exit_unless_it_was_set() -> None:
    telemetry = Telemetry.recording("router")
    with telemetry.span(SpanName.REQUEST):
        pass
    with telemetry.span(SpanName.REQUEST) as late:
        late.fail(Code.DEADLINE_EXCEEDED)
    telemetry.span(SpanName.REQUEST).end()
    assert [span["status"]["code"] for span in telemetry.recorded()] == ["OK", "ERROR", "UNSET"]


def test_a_span_ends_once() -> None:
    telemetry = Telemetry.recording("router")
    span = telemetry.span(SpanName.STREAM)
    span.event("first token", {Attribute.TTFT_MS: 3.5})
    span.end()
    span.set(Attribute.OUTCOME, "late")
    span.set_all({Attribute.OUTCOME: "late"})
    span.event("late")
    span.ok()
    span.end()
    (found,) = telemetry.recorded()
    assert found["attributes"] == {}
    assert [event["name"] for event in found["events"]] == ["first token"]
