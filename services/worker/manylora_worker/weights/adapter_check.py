"""Whether a stored adapter fits the base model: the seam between the servicer and the reader of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.stores.adapter_files import resolve_inside

MAX_CHECKS = 2  # at the same time; the others wait


@dataclass(frozen=True)
class AdapterReport:
    problems: Sequence[FieldViolation] = ()  # with problems the rest means nothing
    max_lora_rank: int = 0
    size_bytes: int = 0  # on the device, in the compute dtype
    target_modules: Sequence[str] = ()  # distinct last path components, sorted


class AdapterValidator(Protocol):
    async def validate(self, path: str) -> AdapterReport:
        """path: relative to the adapter store's root; InvalidRequest where it names no folder inside."""


class ThreadValidator:
    """Runs a blocking check on a thread; it raises InvalidRequest with all problems."""

    def __init__(self, root: Path, check: Callable[[Path], AdapterReport]) -> None:
        self._root = root
        self._check = check
        self._turns = asyncio.Semaphore(MAX_CHECKS)

    async def validate(self, path: str) -> AdapterReport:
        async with self._turns:
            return await asyncio.to_thread(self._validate, path)

    def _validate(self, path: str) -> AdapterReport:
        folder = resolve_inside(self._root, path, field="path")
        try:
            return self._check(folder)
        except InvalidRequest as invalid:
            if not invalid.violations:
                raise
            return AdapterReport(problems=invalid.violations)
