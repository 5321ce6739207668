"""How the house stands: `make house` prints it, and test_house.py holds the limits.

    python tests/arch/house.py

Counts product code alone: what lies under services/ and shared/, without generated modules.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 6


@dataclass
class Module:
    """One file of product code, as far as it is counted."""

    path: Path
    lines: int
    docstring_words: int  # of all strings that stand as statements
    functions: list[tuple[int, str]] = field(default_factory=list)  # lines and name
    annotated: int = 0  # functions with a return annotation

    @property
    def folder(self) -> Path:
        return self.path.parent


def modules(root: Path = ROOT) -> list[Module]:
    paths = [path for top in ("services", "shared") for path in sorted((root / top).rglob("*.py"))]
    return [_module(path, root) for path in paths if "_pb2" not in path.name]


def folder_sizes(found: Iterable[Module]) -> Counter[Path]:
    """Modules in each folder, `__init__` aside."""
    return Counter(module.folder for module in found if module.path.name != "__init__.py")


def words_a_line(found: Iterable[Module]) -> float:
    counted = list(found)
    return sum(module.docstring_words for module in counted) / max(1, sum(module.lines for module in counted))


def annotated_share(found: Iterable[Module]) -> float:
    counted = list(found)
    return sum(module.annotated for module in counted) / max(1, sum(len(module.functions) for module in counted))


def long_documents(root: Path = ROOT) -> dict[Path, int]:
    """Lines of the README and of every decision."""
    documents = [root / "README.md", *sorted((root / "docs/decisions").glob("*.md"))]
    return {path.relative_to(root): path.read_text(encoding="utf-8").count("\n") for path in documents}


def without_test(found: Iterable[Module], root: Path = ROOT) -> list[Path]:
    """Modules without a test file of their name: test_<module>.py, or test_<folder>_<module>.py for a common name."""
    tests = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    left = []
    for module in found:
        stem = module.path.stem
        if stem.startswith("__"):
            continue
        above = [part.removeprefix("manylora_") for part in module.folder.parts]
        if not tests & {stem, *(f"{part}_{stem}" for part in above)}:
            left.append(module.path)
    return left


def report(root: Path = ROOT) -> str:
    found = modules(root)
    sizes = folder_sizes(found)
    lines = [f"{'modules':>8} {'lines':>7} {'docstring words a line':>23}  folder"]
    for folder in sorted(sizes):
        inside = [module for module in found if module.folder == folder]
        lines.append(
            f"{sizes[folder]:8} {sum(m.lines for m in inside):7} {words_a_line(inside):23.2f}  {folder.as_posix()}"
        )
    functions = [(n, f"{module.path.as_posix()}:{name}") for module in found for n, name in module.functions]
    untested = without_test(found, root)
    documents = long_documents(root)
    decisions = {path: n for path, n in documents.items() if path.name != "README.md"}
    lines += [
        "",
        f"{len(found)} modules, {sum(m.lines for m in found)} lines, {len(functions)} functions",
        f"docstring words a line: {words_a_line(found):.2f}",
        f"return annotations: {100 * annotated_share(found):.1f} %",
        f"longest functions: {_longest(functions)}",
        f"longest files: {_longest((m.lines, m.path.as_posix()) for m in found)}",
        f"flattest folders: {_longest((n, folder.as_posix()) for folder, n in sizes.items())}",
        f"README: {documents[Path('README.md')]} lines",
        f"decisions: {len(decisions)}, over 40 lines: {sum(n > 40 for n in decisions.values())}",
        f"modules without a test file of their name: {len(untested)}",
        *(f"  {path.as_posix()}" for path in untested),
    ]
    return "\n".join(lines)


def _module(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    module = Module(path.relative_to(root), text.count("\n"), 0)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            module.functions.append((node.end_lineno - node.lineno + 1, node.name))
            module.annotated += node.returns is not None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            module.docstring_words += len(re.findall(r"\S+", node.value.value))
    return module


def _longest(rows: Iterable[tuple[int, str]]) -> str:
    return "; ".join(f"{n} {name}" for n, name in sorted(rows, key=lambda row: -row[0])[:SHOWN])


if __name__ == "__main__":
    print(report())
