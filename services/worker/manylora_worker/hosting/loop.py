"""The turning of an engine: commands in, a step, what is new out; one turn after the other.

Used by whoever turns an engine: a thread or a task of the worker's process (runtime.py), or a process of its own
(engine_process.py). Knows nothing of how commands come and posts go: that is a Mailbox's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import EngineStats
from manylora_worker.hosting.commands import Command
from manylora_worker.hosting.view import EnginePost

_LOG = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that may fail one after the other before the engine counts as broken."""


class Mailbox(Protocol):
    """Where an engine's commands come from, and its posts go."""

    def take(self) -> tuple[Sequence[Command], bool]:
        """The commands since the last call, and whether the engine is to stop."""

    def sleep(self, timeout_s: float | None) -> None:
        """Until there is something to take, the backend has news, or the time is over. None: for as long as it is."""

    def post(self, post: EnginePost) -> None: ...


class Turner:
    """One turn of an engine after another."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._failed_in_a_row = 0
        self._last_stats: EngineStats | None = None

    def run(self, mailbox: Mailbox, now: Callable[[], float]) -> None:
        """Turns until it is told to stop; what is left then is aborted. Raises what the engine cannot go on from."""
        while self._turn(mailbox, now):
            pass

    def do(self, commands: Sequence[Command], now: float) -> None:
        for command in commands:
            command(self._core, now)

    def after_step(self) -> None:
        """Raises RuntimeError where the model fails in every step."""
        error = self._core.step_error
        if error is None:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        _LOG.error("a step failed", exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps failed one after the other") from error

    def take_post(self) -> EnginePost | None:
        """What is new since the last one; None where nothing is."""
        core, last = self._core, self._last_stats
        stats, outputs, ends = core.stats(), core.take_outputs(), core.take_ended()
        if stats == last and not outputs and not ends:
            return None
        self._last_stats = stats
        adapters_changed = last is None or last.adapter_version != stats.adapter_version
        tenants_changed = last is None or last.tenant_adapters_version != stats.tenant_adapters_version
        slots_changed = last is None or last.slots_version != stats.slots_version
        return EnginePost(
            outputs=outputs,
            ends=ends,
            stats=stats,
            flows=core.take_changed_flows(),
            setbacks=core.take_changed_setbacks(),
            kv_blocks=core.blocks_held(),
            adapters=core.adapter_tiers() if adapters_changed else None,
            tenant_adapters=core.tenant_adapters() if tenants_changed else None,
            slots=core.flow_slots() if slots_changed else None,
        )

    def _turn(self, mailbox: Mailbox, now: Callable[[], float]) -> bool:
        """One turn; False: it was the last."""
        core = self._core
        commands, is_stopping = mailbox.take()
        self.do(commands, now())
        if is_stopping:
            for request_id in core.request_ids():
                core.abort(request_id, now())
            core.drain(now())
            self._post(mailbox)
            return False
        batch = core.begin_step(now())
        if batch is not None:
            core.submit(batch)
        if core.must_wait or (batch is None and core.num_in_flight):
            core.end_step(core.wait(), now())
            self.after_step()
            self._post(mailbox)
            return True
        self._post(mailbox)
        if batch is None:
            mailbox.sleep(core.rest_s())
        return True

    def _post(self, mailbox: Mailbox) -> None:
        post = self.take_post()
        if post is not None:
            mailbox.post(post)
