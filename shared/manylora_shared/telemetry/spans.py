"""Spans: what a service sees of one, the disabled telemetry's, and those over the SDK's."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from manylora_shared.errors import Code, ManyloraError
from manylora_shared.telemetry import traceparent as w3c
from manylora_shared.telemetry.names import Attribute, Attributes, AttributeValue


class Span(Protocol):
    """As a context manager it ends on exit, failed where an exception passes; calls after the end do nothing."""

    @property
    def traceparent(self) -> str:
        """For children, here and in other services; while disabled the parent's, or empty."""

    @property
    def is_recorded(self) -> bool:
        """False: nobody will see it, or its children."""

    def set(self, name: str, value: AttributeValue) -> None: ...

    def set_all(self, values: Attributes) -> None: ...

    def event(self, name: str, values: Attributes | None = None) -> None: ...

    def ok(self) -> None:
        """The work succeeded."""

    def fail(self, code: Code, message: str = "") -> None:
        """CANCELLED and DEADLINE_EXCEEDED count as failures."""

    def fail_with(self, error: BaseException) -> None:
        """A ManyloraError's code, CANCELLED for a cancelled task, else INTERNAL."""

    def end(self, end_ns: int | None = None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class NullSpan:
    __slots__ = ("traceparent",)
    is_recorded = False

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, name: str, value: AttributeValue) -> None:
        pass

    def set_all(self, values: Attributes) -> None:
        pass

    def event(self, name: str, values: Attributes | None = None) -> None:
        pass

    def ok(self) -> None:
        pass

    def fail(self, code: Code, message: str = "") -> None:
        pass

    def fail_with(self, error: BaseException) -> None:
        pass

    def end(self, end_ns: int | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class LiveSpan:
    __slots__ = ("_ended", "_span", "_status_set")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._status_set = False
        self._ended = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def set(self, name: str, value: AttributeValue) -> None:
        if not self._ended:
            self._span.set_attribute(name, value)

    def set_all(self, values: Attributes) -> None:
        if not self._ended:
            self._span.set_attributes(dict(values))

    def event(self, name: str, values: Attributes | None = None) -> None:
        if not self._ended:
            self._span.add_event(name, values)

    def ok(self) -> None:
        self._set_status(Status(StatusCode.OK))

    def fail(self, code: Code, message: str = "") -> None:
        self.set(Attribute.ERROR_TYPE, code.name)
        self._set_status(Status(StatusCode.ERROR, f"{code.name}: {message}" if message else code.name))

    def fail_with(self, error: BaseException) -> None:
        if isinstance(error, ManyloraError):
            self.fail(error.code, error.message)
        elif isinstance(error, asyncio.CancelledError):
            self.fail(Code.CANCELLED)
        else:
            self.fail(Code.INTERNAL, type(error).__name__)

    def _set_status(self, status: Status) -> None:
        if not self._ended:
            self._status_set = True
            self._span.set_status(status)

    def end(self, end_ns: int | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._span.end(end_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._status_set:
            if error is None:
                self.ok()
            elif not isinstance(error, GeneratorExit):
                self.fail_with(error)
            else:
                self.fail(Code.CANCELLED)
        self.end()


def context_of(traceparent: str | None) -> Context:
    """What a span is started in, to be the child of another process's; where there is none, a trace's first."""
    parts = w3c.split(traceparent) if traceparent else None
    if parts is None:
        return Context()
    trace_id, span_id, flags = parts
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())
