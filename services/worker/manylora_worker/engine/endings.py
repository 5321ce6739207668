"""How choices and requests end: what they have is given up in order, then the end is told. A stateless part of
EngineCore.

A finished choice *lingers* until no step or copy has its blocks. A request's end is told when none lingers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.engine.outbox import Outbox, RequestEnd
from manylora_worker.engine.request_table import RequestTable
from manylora_worker.kinds.api import EngineRequest, FinishReason
from manylora_worker.kinds.sequence import Sequence, SequenceGroup, SequenceStatus
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.planning.step_planner import StepPlanner


class Endings:
    """closed: called before a request's end is told."""

    def __init__(
        self,
        requests: RequestTable,
        planner: StepPlanner,
        prefixes: Prefixes,
        adapters: AdapterCache,
        outbox: Outbox,
        closed: Callable[[EngineRequest], None],
    ) -> None:
        self._requests = requests
        self._planner = planner
        self._prefixes = prefixes
        self._adapters = adapters
        self._outbox = outbox
        self._closed = closed

    def end_choice(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        message: str = "",
        stop_token_id: int | None = None,
        refund: bool = False,
    ) -> None:
        """Without a further token. refund: see StepPlanner.remove."""
        self._outbox.choice_ended(sequence, reason, message=message, stop_token_id=stop_token_id)
        self.end_told_choice(sequence, reason, now, message=message, refund=refund)

    def end_told_choice(
        self, sequence: Sequence, reason: FinishReason, now: float, *, message: str = "", refund: bool = False
    ) -> None:
        """As `end_choice`, where its last output told of the end."""
        group = sequence.group
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        was_queued = self._planner.remove(sequence, refund=refund)
        if not self._requests.finished(sequence):
            self._planner.parking.release_blocks(sequence)
        leader = group.leader
        if leader is not None:
            if was_queued and not group.is_forked:
                self._planner.parking.enqueue(leader)  # the prompt is computed anew for the next choice
            return
        end = RequestEnd.of(group, reason, message, now)
        if self._requests.all_finished(group, end):
            self._close(group, end)

    def end_request(
        self, group: SequenceGroup, reason: FinishReason, message: str, now: float, *, refund: bool = False
    ) -> None:
        """The last choice first, so that none becomes the leader."""
        for sequence in reversed(group.sequences):
            if not sequence.is_finished:
                if reason in (FinishReason.ERROR, FinishReason.ADAPTER_FAILED, FinishReason.ADAPTER_UNAVAILABLE):
                    self._prefixes.withdraw(sequence)  # a retry must not find what may have been the cause
                self.end_choice(sequence, reason, now, message=message, refund=refund)

    def let_go(self) -> None:
        for sequence in self._requests.linger_no_more():
            self._planner.parking.release_blocks(sequence)
            end = self._requests.let_go(sequence)
            if end is not None:
                self._close(sequence.group, end)

    def _close(self, group: SequenceGroup, end: RequestEnd) -> None:
        """None of its choices lingers."""
        adapter_byte_s = self._adapters.release(end.request_id, end.ended_s)
        self._requests.remove(group)
        self._closed(group.request)
        kv_block_s = group.holding.block_seconds(end.ended_s)
        self._outbox.request_ended(replace(end, kv_block_s=kv_block_s, adapter_byte_s=adapter_byte_s))
