"""The header that ties spans of several services into one trace."""

from __future__ import annotations

import pytest
from manylora_shared.telemetry import SpanName, Telemetry
from manylora_shared.telemetry.traceparent import trace_id_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        None,
        "nonsense",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ],
)
def test_without_a_good_parent_a_trace_begins(parent: str | None) -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.REQUEST, parent=parent).end()
    (span,) = telemetry.recorded()
    assert span["parent_id"] is None
    assert trace_id_of(parent or "") == ""


def test_later_versions_of_the_header_may_say_more() -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.REQUEST, parent="cc" + PARENT[2:] + "-what-comes").end()
    assert telemetry.recorded()[0]["trace_id"] == trace_id_of(PARENT)


def test_a_caller_that_does_not_sample_is_respected() -> None:
    telemetry = Telemetry.recording("router")
    with telemetry.span(SpanName.REQUEST, parent=PARENT[:-2] + "00") as span:
        assert span.traceparent.endswith("-00")
        assert trace_id_of(span.traceparent) == trace_id_of(PARENT)
    assert telemetry.recorded() == []
