"""How long a front took to write a request's frames: one span, told at its end, of a request that is traced."""

from __future__ import annotations

import asyncio

from manylora_shared.telemetry import Attribute, Attributes, Span, SpanName, Telemetry


class StreamWrites:
    """`begin` and `end` alternate; a last `end` may be missing."""

    def __init__(self, telemetry: Telemetry, request: Span) -> None:
        self._telemetry = telemetry
        self._request = request
        self.has_begun = False
        self._is_recorded = request.is_recorded
        self._began_at = 0.0
        self._count = 0
        self._sum_s = self._slowest_s = 0.0
        self._first_ns = self._last_ns = 0

    def begin(self) -> None:
        self.has_begun = True
        if self._is_recorded:
            self._began_at = asyncio.get_running_loop().time()
            self._first_ns = self._first_ns or self._telemetry.now_ns()

    def end(self) -> None:
        if self._is_recorded:
            took_s = asyncio.get_running_loop().time() - self._began_at
            self._count += 1
            self._sum_s += took_s
            self._slowest_s = max(self._slowest_s, took_s)
            self._last_ns = self._telemetry.now_ns()

    def tell(self, attributes: Attributes) -> None:
        if not self._count:
            return
        told: Attributes = {
            **attributes,
            Attribute.WRITES: self._count,
            Attribute.WRITE_MS: self._sum_s * 1e3,
            Attribute.SLOWEST_WRITE_MS: self._slowest_s * 1e3,
        }
        parent, started_ns = self._request.traceparent, self._first_ns
        span = self._telemetry.span(SpanName.STREAM_WRITE, parent=parent, attributes=told, start_ns=started_ns)
        span.ok()
        span.end(self._last_ns)
