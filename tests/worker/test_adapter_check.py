"""Whether a stored adapter fits, checked on a thread, a few at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterUid
from manylora_worker.weights.adapter_check import MAX_CHECKS, AdapterReport, ThreadValidator
from manylora_worker.weights.store import FolderStore

UID = AdapterUid("ab" * 32)


def validator_of(root: Path, check: Callable[[Path], AdapterReport]) -> ThreadValidator:
    def lends(uid: AdapterUid, path: str) -> AbstractContextManager[None]:
        raise AssertionError("nothing is tried here")

    return ThreadValidator(FolderStore(root), check, lends, lambda folder, uid: str(folder))


async def test_problems_are_a_report_and_another_error_is_none(tmp_path: Path) -> None:
    problem = FieldViolation("r", "is too large")
    (tmp_path / "x").mkdir()

    def check(folder: Path) -> AdapterReport:
        assert folder == (tmp_path / "x").resolve()
        raise InvalidRequest.of_all([problem])

    assert await validator_of(tmp_path, check).validate("x", UID) == AdapterReport(problems=(problem,))

    def fail(folder: Path) -> AdapterReport:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await validator_of(tmp_path, fail).validate("x", UID)


async def test_nothing_outside_the_store_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").mkdir()
    seen: list[Path] = []
    validator = validator_of(tmp_path / "root", lambda folder: seen.append(folder) or AdapterReport())
    for path in ("../other", "/", "absent"):
        with pytest.raises(InvalidRequest):
            await validator.validate(path, UID)
        with pytest.raises(InvalidRequest):
            await validator.largest_update(path, UID)
        with pytest.raises(InvalidRequest):
            validator.lends(path, UID)
    assert seen == []


class HangingStore(FolderStore):
    """A far one that never brings UID."""

    is_far = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_over = threading.Event()

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        if uid == UID:
            self.is_over.wait(60)


async def test_fetches_that_hang_hold_up_no_other_check(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    store = HangingStore(tmp_path)
    validator = ThreadValidator(
        store, lambda folder: AdapterReport(max_lora_rank=8), lambda *_: nullcontext(), lambda folder, uid: ""
    )
    hanging = [asyncio.create_task(validator.validate("x", UID)) for _ in range(2 * MAX_CHECKS)]
    try:
        async with asyncio.timeout(10):
            assert (await validator.validate("y", AdapterUid("cd" * 32))).max_lora_rank == 8
        assert not any(task.done() for task in hanging)
    finally:
        store.is_over.set()
        await asyncio.gather(*hanging)


async def test_so_many_at_a_time(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / str(i)).mkdir()
    lock, running, most = threading.Lock(), [0], [0]
    go_on = threading.Event()

    def check(folder: Path) -> AdapterReport:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        go_on.wait(10)
        with lock:
            running[0] -= 1
        return AdapterReport(max_lora_rank=1)

    validator = validator_of(tmp_path, check)
    checks = [asyncio.create_task(validator.validate(str(i), UID)) for i in range(5)]
    await asyncio.sleep(0.05)
    go_on.set()
    assert len(await asyncio.gather(*checks)) == 5
    assert most[0] == MAX_CHECKS


async def test_a_check_that_its_caller_left_keeps_its_turn(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / str(i)).mkdir()
    started, go_on = [], threading.Event()

    def check(folder: Path) -> AdapterReport:
        started.append(folder.name)
        go_on.wait()
        raise OSError("nobody hears it")

    validator = validator_of(tmp_path, check)
    for i in range(4):
        task = asyncio.create_task(validator.validate(str(i), UID))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
    assert started == ["0", "1"], "those that were left go on, and the others had to wait"
    go_on.set()
    with pytest.raises(OSError, match="nobody"):
        await validator.validate("4", UID)
