"""Sets of cores: how they are written, and who keeps to them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from manylora_shared.process.cores import format_cores, keep_to, parse_cores, usable_cores

linux_alone = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is kept to some cores")


@pytest.mark.parametrize(
    ("text", "cores"), [("", set()), ("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("7, 7-7,6", {6, 7}), ("1023", {1023})]
)
def test_cores_are_written_as_for_taskset(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(format_cores(cores)) == cores


@pytest.mark.parametrize("text", ["a", "-1", "1-", "3-2", "1,,2", ",", "0x1", "1.5", "12345"])
def test_what_is_no_set_of_cores_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"'.*' is no core and no range of cores"):
        parse_cores(text)


@linux_alone
def test_a_thread_keeps_to_its_cores_and_so_does_what_it_begins() -> None:
    before = usable_cores()
    one = frozenset([max(before)])
    seen: list[frozenset[int]] = []

    def run() -> None:
        keep_to(one)
        seen.append(usable_cores())
        command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        seen.append(frozenset(map(int, subprocess.check_output(command).split())))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [one, one]
    assert usable_cores() == before == os.sched_getaffinity(0)
