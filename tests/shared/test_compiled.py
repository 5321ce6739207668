"""Which modules a process imports, once it has asked for the compiled ones. Each case in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from manylora_shared.process import compiled

PROGRAM = """
import sys
from pathlib import Path
from manylora_shared.process import compiled
sys.path.insert(0, {parent!r})
{before}
try:
    print(compiled.use({folder}))
except RuntimeError as e:
    print(e)
import package.one, package.other
print(package.one.MADE_BY, package.other.MADE_BY)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package of two modules, both "compiled": Python finds them by the same rule as it finds extension modules."""
    folder = tmp_path / compiled.FOLDER
    sources = {}
    for parent, made_by in ((tmp_path, "sources"), (folder, "compiler")):
        package = parent / "package"
        package.mkdir(parents=True)
        for name in ("one", "other"):
            path = package / f"{name}.py"
            path.write_text(f"MADE_BY = {made_by!r}\n")
            sources.setdefault(f"package.{name}", path)
    (tmp_path / "package/__init__.py").touch()
    (folder / compiled.MANIFEST).write_text(json.dumps(compiled.manifest(sources)))
    return folder


def said(folder: Path, *, before: str = "", given: bool = True) -> list[str]:
    program = PROGRAM.format(parent=str(folder.parent), before=before, folder=f"Path({str(folder)!r})" if given else "")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_all_are_the_compiled_ones(folder: Path) -> None:
    assert said(folder) == ["", "compiler compiler"]
    assert said(folder, given=False) == ["", "compiler compiler"], "the first folder on sys.path"


def test_where_nothing_was_compiled_the_sources_are_imported(folder: Path) -> None:
    (folder / compiled.MANIFEST).unlink()
    assert said(folder, before="sys.path[1:] = [p for p in sys.path[1:] if 'site-packages' not in p]", given=False) == [
        "nothing was compiled",
        "sources sources",
    ]


def test_none_is_used_once_a_source_has_changed(folder: Path) -> None:
    """One that changed alone, among others that are as they were."""
    source = folder.parent / "package/other.py"
    source.write_text(source.read_text() + "CHANGED = True\n")
    why_not, made_by = said(folder)
    assert str(source) in why_not
    assert made_by == "sources sources"


def test_none_is_used_of_another_pythons(folder: Path) -> None:
    path = folder / compiled.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"interpreter": ".cpython-39-other.so"}))
    why_not, made_by = said(folder)
    assert ".cpython-39-other.so" in why_not
    assert made_by == "sources sources"


def test_it_is_an_error_to_ask_too_late(folder: Path) -> None:
    why_not, made_by = said(folder, before="import package.one")
    assert "package.one was imported before" in why_not
    assert made_by == "sources sources", "two layouts in one process"
