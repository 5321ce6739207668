"""Whether a stored adapter fits the base model: the seam between the servicer and whoever can read weights.

Two implementations: ThreadValidator runs a blocking check (the torch half's) on a thread; FakeValidator is the
simulation's and the fake engine's. Neither loads the adapter for serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.stores.adapter_files import resolve_inside

MAX_CHECKS = 2
"""At the same time; the others wait."""


@dataclass(frozen=True)
class AdapterReport:
    """What an adapter is, or why it is none: with `problems` the rest means nothing."""

    problems: Sequence[FieldViolation] = ()
    max_lora_rank: int = 0
    size_bytes: int = 0
    """On the device, in the compute dtype."""
    target_modules: Sequence[str] = ()
    """Distinct last path components, sorted."""


class AdapterValidator(Protocol):
    async def validate(self, path: str) -> AdapterReport:
        """Checks the adapter in the folder `path`, relative to the adapter store's root.

        Raises:
            InvalidRequest: the path does not name a folder inside the store.
        """


class ThreadValidator:
    """
    Args:
        root: the adapter store.
        check: reads and checks the adapter in a folder; called on a thread. Raises InvalidRequest with all problems.
    """

    def __init__(self, root: Path, check: Callable[[Path], AdapterReport]) -> None:
        self._root = root
        self._check = check
        self._turns = asyncio.Semaphore(MAX_CHECKS)

    async def validate(self, path: str) -> AdapterReport:
        async with self._turns:
            return await asyncio.to_thread(self._validate, path)

    def _validate(self, path: str) -> AdapterReport:
        return report(self._check, resolve_inside(self._root, path, field="path"))


def report(check: Callable[[Path], AdapterReport], folder: Path) -> AdapterReport:
    """What `check` finds, its violations among it."""
    try:
        return check(folder)
    except InvalidRequest as invalid:
        if not invalid.violations:
            raise
        return AdapterReport(problems=invalid.violations)


class FakeValidator:
    """Finds every adapter good, but those whose path has something in `problems`."""

    def __init__(self, problems: Mapping[str, Sequence[FieldViolation]] | None = None) -> None:
        self._problems = problems or {}

    async def validate(self, path: str) -> AdapterReport:
        if path in self._problems:
            return AdapterReport(problems=self._problems[path])
        return AdapterReport(max_lora_rank=8, size_bytes=1 << 20, target_modules=("q_proj", "v_proj"))
