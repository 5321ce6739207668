"""The engine on the simulation's event loop: no thread, and a step takes the time that it is told to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.loop import EngineLoop
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.hosting.stall import Progress
from manylora_worker.hosting.view import Command
from manylora_worker.kinds.api import AdapterBackend, StepBatch
from manylora_worker.models.parts import ModelInfo

_LOG = logging.getLogger(__name__)


class LoopRuntime(Runtime):
    """
    Args:
        step_s: the virtual seconds of a step.
        pause_unread_tokens: as EngineView's; less than a worker's, where answers are short.
    """

    def __init__(
        self,
        core: EngineCore,
        backend: AdapterBackend,
        model: ModelInfo,
        *,
        max_requests: int,
        step_s: Callable[[StepBatch], float],
        pause_unread_tokens: int = PAUSE_UNREAD_TOKENS,
    ) -> None:
        super().__init__(model, core.stats(), core.check, max_requests, pause_unread_tokens)
        self.merge_problem = core.merge_problem
        self._core = core
        self._backend = backend
        self._engine = EngineLoop(core, self.now, self.view.take)
        self._step_s = step_s
        self._commands: list[Command] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_at_rest = False
        self.num_changes = 0  # while it stands, nothing changes in the engine

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine")

    async def stop(self) -> None:
        self.view.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.view.failure is None:
            self.num_changes += 1
            self._engine.stop(self._take())
        self._backend.close()

    def progress(self) -> Progress:
        return Progress(self.num_changes, self._is_at_rest and not self._news.is_set())

    def wake(self) -> None:
        self._news.set()

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._news.set()

    def _take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    async def _run(self) -> None:
        try:
            while True:
                await self._turn()
        except Exception as error:
            _LOG.critical("the engine has failed", exc_info=error)
            self.view.fail(f"{type(error).__name__}: {error}")

    async def _turn(self) -> None:
        core = self._core
        self._news.clear()
        self.num_changes += 1
        batch = self._engine.begin(self._take())
        if batch is not None:
            try:
                await asyncio.sleep(self._step_s(batch))
            finally:
                self.num_changes += 1
                while core.num_in_flight:
                    self._engine.end()
        self._engine.tell()
        if batch is None:
            rest_s = core.rest_s()
            if rest_s is None:
                core.check_invariants()
            await self._rest(rest_s)

    async def _rest(self, longest_s: float | None) -> None:
        timer = None if longest_s is None else asyncio.get_running_loop().call_later(longest_s, self.wake)
        self._is_at_rest = True
        try:
            await self._news.wait()
        finally:
            self._is_at_rest = False
            if timer is not None:
                timer.cancel()
