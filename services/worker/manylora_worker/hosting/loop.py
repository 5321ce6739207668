"""The engine's loop in parts, which the engine's thread and the simulation drive: commands in, a step, news out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import EngineStats
from manylora_worker.hosting.view import Command, EnginePost
from manylora_worker.kinds.api import StepBatch

_LOG = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # one after the other
_SLACK_S = 1e-3  # by so much before it has to be, a step is begun
_LEAD_LEFT = 0.95  # of the longest beginning, a step later


class EngineLoop:
    def __init__(self, core: EngineCore, now: Callable[[], float], post: Callable[[EnginePost], None]) -> None:
        self._core = core
        self._now = now
        self._post = post
        self._failed_in_a_row = 0
        self._last_stats: EngineStats | None = None
        self._lead_s = 0.0  # what the beginning of a step took lately, at most, the thread's waking included
        self._due_s = math.inf  # when a step that is put off should begin

    def rest_s(self) -> float:
        """How long the next step may be put off without the device waiting for it, as things are now; 0: not at all.
        Who comes by then is in it.
        """
        now, ready_s = self._now(), self._core.next_step_s()
        if ready_s is None or (due_s := ready_s - self._lead_s - _SLACK_S) <= now:
            return 0.0
        self._due_s = due_s
        return due_s - now

    def begin(self, commands: Iterable[Command]) -> StepBatch | None:
        due_s, self._due_s = min(self._due_s, self._now()), math.inf
        self._do(commands)
        batch = self._core.begin_step(self._now())
        if batch is not None:
            self._core.submit(batch, self._now())
            self._lead_s = max(_LEAD_LEFT * self._lead_s, self._now() - due_s)
        return batch

    def end(self) -> None:
        """Waits for the oldest step in flight. Raises RuntimeError: the model fails in every step."""
        core = self._core
        core.end_step(core.wait(), self._now())
        error = core.step_error
        if error is None:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += not core.is_trial_error
        _LOG.error("a step failed", exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps failed one after the other") from error

    def stop(self, commands: Iterable[Command]) -> None:
        self._do(commands)
        for request_id in self._core.request_ids():
            self._core.abort(request_id, self._now())
        self._core.drain(self._now())
        self.tell()

    def tell(self) -> None:
        core, last = self._core, self._last_stats
        stats, outputs, ends = core.stats(), core.take_outputs(), core.take_ended()
        if stats == last and not outputs and not ends:
            return
        self._last_stats = stats
        adapters_changed = last is None or last.adapter_version != stats.adapter_version
        tenants_changed = last is None or last.tenant_adapters_version != stats.tenant_adapters_version
        slots_changed = last is None or last.slots_version != stats.slots_version
        self._post(
            EnginePost(
                outputs=outputs,
                ends=ends,
                stats=stats,
                flows=core.take_changed_flows(),
                setbacks=core.take_changed_setbacks(),
                kv_blocks=core.blocks_held(),
                adapters=core.adapter_tiers() if adapters_changed else None,
                tenant_adapters=core.tenant_adapters() if tenants_changed else None,
                slots=core.flow_slots() if slots_changed else None,
                step_times=core.take_step_times(),
            )
        )

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            command(self._core, self._now())
