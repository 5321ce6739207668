"""Whether a stored adapter fits the base model: the seam between the servicer and the reader of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterUid

from manylora_worker.weights.store import AdapterStore

MAX_CHECKS = 2  # at the same time; the others wait
_MAX_FETCHES = 32  # for checks: routers let a tenant have a part of their uploads
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class ChangedModule:
    path: str
    rank: int  # 0: its biases, or some tokens' rows, alone are changed


@dataclass(frozen=True)
class Coverage:
    modules: Sequence[ChangedModule] = ()  # by path
    num_layers: int = 0  # of the base model, that an adapter may change
    num_tensors: int = 0  # of the file
    num_left_out: int = 0  # of these, for parts of the base model that no text goes through
    left_out: Sequence[str] = ()  # the first of them


@dataclass(frozen=True)
class AdapterReport:
    problems: Sequence[FieldViolation] = ()  # with problems the rest means nothing
    max_lora_rank: int = 0
    size_bytes: int = 0  # on the device, in the compute dtype
    target_modules: Sequence[str] = ()  # distinct last path components, sorted
    coverage: Coverage = field(default_factory=Coverage)
    rope: str = ""  # its own rotation of positions, JSON
    max_context_tokens: int = 0  # 0: the base model's
    goes_alone: bool = False  # in a request


class AdapterValidator(Protocol):
    async def validate(self, path: str, uid: AdapterUid) -> AdapterReport:
        """path: relative to the adapter store's root; InvalidRequest where it names no folder inside."""

    def lends(self, path: str, uid: AdapterUid) -> AbstractContextManager[None]:
        """Meanwhile loads of `uid` find its files there."""

    async def largest_update(self, path: str, uid: AdapterUid) -> str:
        """Which module's, and how large, for people to read."""


Lends = Callable[[AdapterUid, str], AbstractContextManager[None]]


class ThreadValidator:
    """Runs blocking checks on a thread. One that its caller leaves keeps its turn: what it may cost is bounded
    (source.py, peft/patterns.py), what runs at a time is, too."""

    def __init__(
        self,
        store: AdapterStore,
        check: Callable[[Path], AdapterReport],
        lends: Lends,
        largest_update: Callable[[Path, AdapterUid], str],
    ) -> None:
        """`check` raises InvalidRequest with all problems."""
        self._store = store
        self._check = check
        self._lends = lends
        self._largest_update = largest_update
        self._turns = asyncio.Semaphore(MAX_CHECKS)
        self._fetchers = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="to-check")

    async def validate(self, path: str, uid: AdapterUid) -> AdapterReport:
        await self._fetched(path, uid)
        return await self._in_turn(self._validate, path, uid)

    def lends(self, path: str, uid: AdapterUid) -> AbstractContextManager[None]:
        self._store.check_path(path)
        return self._lends(uid, path)

    async def largest_update(self, path: str, uid: AdapterUid) -> str:
        return await self._in_turn(self._measure, path, uid)

    async def _fetched(self, path: str, uid: AdapterUid) -> None:
        """Before its turn: a store that hangs holds up no other check."""
        if self._store.is_far:
            self._store.check_path(path)
            with suppress(InvalidRequest):  # the check finds it again, and tells it
                await asyncio.get_running_loop().run_in_executor(self._fetchers, self._store.fetch, uid, path)

    async def _in_turn(self, work: Callable[..., T], *arguments: object) -> T:
        await self._turns.acquire()
        running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        running.add_done_callback(self._leave)
        return await asyncio.shield(running)

    def _leave(self, running: asyncio.Future[Any]) -> None:
        self._turns.release()
        if not running.cancelled():
            running.exception()  # whoever asked may be gone

    def _validate(self, path: str, uid: AdapterUid) -> AdapterReport:
        try:
            with self._store.staged(path, uid) as folder:
                return self._check(folder)
        except InvalidRequest as invalid:
            if not invalid.violations or invalid.violations[0].field == "path":
                raise
            return AdapterReport(problems=invalid.violations)

    def _measure(self, path: str, uid: AdapterUid) -> str:
        with self._store.staged(path, uid) as folder:
            return self._largest_update(folder, uid)
