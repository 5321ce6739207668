"""What services run, compiled, decides as the sources do, which all other tests run."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from manylora_shared.process import compiled

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.wide
def test_compiled_code_decides_as_its_sources_do() -> None:
    folder = Path(sysconfig.get_path("platlib")) / compiled.FOLDER
    if not folder.exists():
        pytest.skip("nothing was compiled here: make compiled")
    by_sources, by_compiled = decided(), decided(str(folder))
    assert by_sources.pop("core").endswith(".py")
    assert not by_compiled.pop("core").endswith(".py")
    assert by_compiled == by_sources


def decided(*folder: str) -> dict[str, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.sim.decisions", *folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found
