"""The trace of one Execute. Owns the request's open span.

Its phases are told afterwards from the engine's times, by the runtime's clock; quanta as their tokens came here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from manylora_shared.composition import content_of
from manylora_shared.errors import Code
from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_shared.metadata import ADAPTER_KEY, TRACEPARENT_KEY
from manylora_shared.telemetry import Attribute, Attributes, SpanName, Telemetry, request_attributes

from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.kinds.api import EngineRequest, TokenOutput

_MAX_QUANTA = 64  # told apart of one request
_NOT_LOADED = (EndKind.ADAPTER_FAILED, EndKind.ADAPTER_UNAVAILABLE)
_CODES = {
    EndKind.ABORTED: Code.UNAVAILABLE,
    EndKind.ADAPTER_FAILED: Code.FAILED_PRECONDITION,
    EndKind.ADAPTER_UNAVAILABLE: Code.UNAVAILABLE,
    EndKind.ERROR: Code.INTERNAL,
    EndKind.ENGINE_FAILED: Code.UNAVAILABLE,
    EndKind.SLOW_READER: Code.RESOURCE_EXHAUSTED,
}


class ExecuteSpans:
    """A context manager around the handler's work; where it is left early, the span says why.

    `now_s`: the runtime's clock at the start.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        request: EngineRequest,
        metadata: Mapping[str, str],
        *,
        worker_id: str,
        now_s: float,
    ) -> None:
        self._telemetry = telemetry
        self._has_adapter = request.adapter_uid is not None
        self._attributes = request_attributes(
            tenant=request.tenant_id,
            qos_class=request.qos_class.value,
            adapter=metadata.get(ADAPTER_KEY, ""),
            adapter_version=content_of(request.adapter_uid) if request.adapter_uid else "",
            request_id=request.request_id,
        )
        self._attributes[Attribute.WORKER_ID] = worker_id
        self._output_tokens = 0
        self._quantum_tokens = QUANTUM_TOKENS * request.n
        self._quanta_s: list[float] = []  # when each but the last was over
        self._started_ns = telemetry.now_ns()
        self._started_s = now_s
        self._span = telemetry.span(
            SpanName.EXECUTE,
            parent=metadata.get(TRACEPARENT_KEY),
            attributes=self._attributes | {Attribute.PROMPT_TOKENS: len(request.prompt_token_ids)},
            start_ns=self._started_ns,
            server=True,
        )

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span.set(Attribute.OUTPUT_TOKENS, self._output_tokens)
        self._span.__exit__(kind, error, traceback)

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def count(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        before = self._output_tokens
        self._output_tokens += sum(len(output.token_ids) for output in outputs)
        is_over = self._output_tokens // self._quantum_tokens > before // self._quantum_tokens
        if is_over and len(self._quanta_s) < _MAX_QUANTA and self._span.is_recorded:
            self._quanta_s.append(now_s)

    def end(self, end: StreamEnd) -> None:
        """The span itself ends with the `with` block."""
        self._span.set(Attribute.OUTCOME, end.kind.value)
        if end.request_end is not None:
            self._span.set(Attribute.KV_SWAPPED, end.request_end.num_swaps)
            self._span.set(Attribute.KV_EVICTED, end.request_end.num_evictions)
        if end.kind is EndKind.COMPLETED:
            self._span.ok()
        else:
            self._span.fail(_CODES[end.kind], end.message)
        if end.request_end is not None and self._span.is_recorded:
            is_loaded = end.request_end.times.adapter_ready_s is not None
            self._tell_phases(end.request_end, failed=end.kind in _NOT_LOADED and not is_loaded)

    def _tell_phases(self, end: RequestEnd, *, failed: bool) -> None:
        times = end.times
        if self._has_adapter:
            self._tell(SpanName.ADAPTER_LOAD, times.added_s, times.adapter_ready_s, end, failed=failed)
        if times.first_step_s is not None:
            parent = self._tell(SpanName.PREFILL, times.first_step_s, times.first_token_s, end)
            if times.first_built_s is not None:
                rows: Attributes = {Attribute.BATCH_ROWS: times.first_rows}
                self._tell(SpanName.BATCH_BUILD, times.first_step_s, times.first_built_s, end, parent=parent, more=rows)
        if times.first_token_s is not None:
            parent = self._tell(SpanName.DECODE, times.first_token_s, None, end)
            ends_s = [at_s for at_s in self._quanta_s if times.first_token_s < at_s < end.ended_s]
            for start_s, end_s in itertools.pairwise([times.first_token_s, *ends_s, end.ended_s]):
                self._tell(SpanName.DECODE_QUANTUM, start_s, end_s, end, parent=parent)

    def _tell(
        self,
        name: str,
        start_s: float,
        end_s: float | None,
        end: RequestEnd,
        *,
        failed: bool = False,
        parent: str = "",
        more: Attributes | None = None,
    ) -> str:
        """To the request's end where the phase was not left. Its traceparent."""
        span = self._telemetry.span(
            name,
            parent=parent or self._span.traceparent,
            attributes=self._attributes | dict(more or {}),
            start_ns=self._ns(start_s),
        )
        if failed:
            span.fail(Code.FAILED_PRECONDITION, end.message)
        else:
            span.ok()
        span.end(self._ns(end.ended_s if end_s is None else end_s))
        return span.traceparent

    def _ns(self, at_s: float) -> int:
        return self._started_ns + round((at_s - self._started_s) * 1e9)
