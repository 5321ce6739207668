"""Whose requests this worker takes: everybody's, or one tenant's with one adapter, which is in its base weights then.

Owns the change from one to the other, on the event loop. A worker that changes takes no request; those that it runs
have HAND_OVER_S to end, and go on at other workers then. What goes wrong leaves it to everybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ids import AdapterUid, TenantId
from manylora_shared.telemetry.logs import fields

from manylora_worker.hosting.runtime import Runtime
from manylora_worker.kinds.api import EngineRequest

_LOG = logging.getLogger(__name__)
HAND_OVER_S = 15.0
_LOOK_S = 0.02


class Owner(NamedTuple):
    adapter_uid: AdapterUid
    tenant_id: TenantId


class Dedicated(NamedTuple):
    """As it is told: `problem` is why the last change came to nothing."""

    owner: Owner | None
    is_ready: bool
    problem: str = ""


TO_EVERYBODY = Dedicated(None, is_ready=True)


class Dedication:
    """hand_over: ends what routers run here. changed: called after each change of `state`."""

    def __init__(self, runtime: Runtime, worker_id: str, hand_over: Callable[[], None]) -> None:
        self._runtime = runtime
        self._worker_id = worker_id
        self._hand_over = hand_over
        self.changed: Callable[[], None] = lambda: None
        self.state = TO_EVERYBODY
        self._merged: Owner | None = None  # in the engine
        self._task: asyncio.Task[None] | None = None
        runtime.admits = self.check

    def check(self, request: EngineRequest) -> None:
        """Raises ServiceUnavailable."""
        owner, is_ready, _ = self.state
        if not is_ready:
            raise ServiceUnavailable(f"worker {self._worker_id} changes whose requests it takes")
        if owner is not None and owner != (request.adapter_uid, request.tenant_id):
            raise ServiceUnavailable(f"worker {self._worker_id} takes requests with one adapter alone")

    def set(self, owner: Owner | None) -> None:
        """The last one counts, of several before the first is through."""
        if self._task is None and owner == self._merged:
            self._tell(Dedicated(owner, is_ready=True))
            return
        self._tell(Dedicated(owner, is_ready=False))
        if self._task is None:
            self._task = asyncio.create_task(self._change(), name="dedication")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _change(self) -> None:
        try:
            while (owner := self.state.owner) != self._merged:
                if await self._is_quiet(owner):
                    await self._merge(owner)
            self._tell(self.state._replace(is_ready=True))
        finally:
            self._task = None

    async def _is_quiet(self, owner: Owner | None) -> bool:
        """Waits until nothing runs here, and is asked for again where another owner is wanted meanwhile."""
        loop = asyncio.get_running_loop()
        hand_over_at = loop.time() + HAND_OVER_S
        while self._runtime.view.running and self.state.owner == owner:
            if loop.time() >= hand_over_at:
                self._hand_over()
                hand_over_at += HAND_OVER_S
            await asyncio.sleep(_LOOK_S)
        return self.state.owner == owner

    async def _merge(self, owner: Owner | None) -> None:
        more = fields(worker=self._worker_id, tenant=owner.tenant_id if owner else "", adapter=owner and owner[0])
        problem = await asyncio.wrap_future(self._runtime.set_merged(*(owner or (None, TenantId("")))))
        self._merged = None if problem else owner
        if not problem:
            _LOG.info("an adapter is in the base weights" if owner else "the base weights are back", extra=more)
        elif owner == self.state.owner:
            _LOG.error("an adapter was not merged: %s", problem, extra=more)
            self._tell(Dedicated(None, is_ready=False, problem=problem))

    def _tell(self, state: Dedicated) -> None:
        if state != self.state:
            self.state = state
            self.changed()
