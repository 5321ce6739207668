"""No dead code, no loose ends, no commands in the documents that do not exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "shared/manylora",
    "shared/manylora_shared",
    *(f"services/{s}/manylora_{s}" for s in ("router", "scheduler", "worker")),
]
CODE = ["shared", "services", "tests", "bench", "examples", "protos", "deploy"]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FOR_TESTS = "manylora_sim"
"""Modules that exist for tests and the simulation."""


def tracked_text_files() -> list[Path]:
    """What is, or would be, committed, as far as it is text that people write."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".proto", ".txt", ".json", ""}
    return [path for name in listed if (path := ROOT / name).is_file() and path.suffix in kinds and "_pb2" not in name]


def test_no_commented_out_code_and_no_notes_to_self() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "ERA,FIX", "--output-format", "concise", *CODE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_no_notes_to_self_in_other_files() -> None:
    notes = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        str(path.relative_to(ROOT)) for path in tracked_text_files() if notes.search(path.read_text(errors="ignore"))
    ]
    assert not found


def test_no_paths_of_one_machine() -> None:
    """Nothing that holds on one machine alone: home and work folders, hosts of package mirrors."""
    local = re.compile(r"/(wo" + r"rk|ro" + r"ot|ho" + r"me/\w+)/|files\.python" + r"hosted|down" + r"load\.pytorch")
    found = [
        str(path.relative_to(ROOT)) for path in tracked_text_files() if local.search(path.read_text(errors="ignore"))
    ]
    assert not found


def test_every_module_is_used() -> None:
    """Each is imported by another module, or is run: `python -m`, a console script, or a `__main__`."""
    used = imported_names()
    text = "\n".join(path.read_text() for path in [*ROOT.glob("*.yml"), ROOT / "pyproject.toml"])
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name in ("__init__.py", "__main__.py") or "_pb2" in path.name:
                continue
            name = ".".join(path.with_suffix("").relative_to((ROOT / package).parent).parts)
            assert name in used or name in text, f"{name} is used by nothing"


def imported_names() -> set[str]:
    """All dotted names that code imports, modules and what is taken from them; from tests only what FOR_TESTS names."""
    names: set[str] = set()
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            found = imports_of(path)
            names |= {name for name in found if name.startswith(FOR_TESTS)} if folder == "tests" else found
    return names


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_documents_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)|^ *make ([a-z-]+)", document.read_text(), flags=re.MULTILINE))
        assert {a or b for a, b in named} <= targets, document.name
    assert set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)) <= targets


def test_documents_link_to_files_that_exist() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their names alone: of two with one name the second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
