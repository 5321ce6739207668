"""The process that judges: one list in, one list out, within bounds."""

from __future__ import annotations

import json
import subprocess
import sys

from manylora_router.quality import judge_process


def judged(asked: list[list[object]]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", judge_process.__name__]
    return subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=60, check=False)


def test_scores_or_why_there_is_none() -> None:
    done = judged([["regex", "a+", "aa"], ["regex", "(", "a"], ["json_schema", {"type": "integer"}, "7"]])
    first, second, third = json.loads(done.stdout)
    assert (first, third) == (1.0, 1.0)
    assert "the pattern is none" in second


def test_memory_is_bounded() -> None:
    """A text of a gigabyte is not made."""
    done = judged([["regex", "a{0,4000000000}" * 2, "a"], ["json", None, "1"]])
    assert done.returncode != 0 or isinstance(json.loads(done.stdout)[0], str | float)
