"""Modules that run compiled where `deploy/compile.py` has compiled them (docs/decisions/0028)."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = "manylora_compiled"
MANIFEST = "manifest.json"


def interpreter() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def manifest(sources: Mapping[str, Path]) -> dict[str, object]:
    """sources: by the modules' full names."""
    digests = {name: _digest(path) for name, path in sources.items()}
    return {"interpreter": interpreter(), "sources": digests}


def use(folder: Path | None = None) -> str:
    """From now on compiled modules are imported; or says why not. Raises RuntimeError: one was imported before."""
    found = folder if folder is not None else _find(sys.path)
    if found is None:
        return "nothing was compiled"
    noted = json.loads((found / MANIFEST).read_text(encoding="utf-8"))
    if noted["interpreter"] != interpreter():
        return f"{found} was compiled for {noted['interpreter']}, and this is {interpreter()}"
    names: dict[str, str] = noted["sources"]
    packages = {package: importlib.import_module(package) for package in {name.rpartition(".")[0] for name in names}}
    for name, digest in names.items():
        package, _, module = name.rpartition(".")
        source = Path(packages[package].__path__[0]) / f"{module}.py"
        # One that changed alone would not do: compiled modules know one another's layout.
        if not source.is_file() or _digest(source) != digest:
            return f"{source} is another than was compiled into {found}"
        if name in sys.modules:
            raise RuntimeError(f"{name} was imported before the compiled modules were asked for")
    sys.path.append(str(found))  # what the modules of a compilation have in common is a module by itself
    for package, at in packages.items():
        at.__path__.insert(0, str(found.joinpath(*package.split("."))))
    return ""


def _find(folders: Iterable[str]) -> Path | None:
    return next((found for folder in folders if (found := Path(folder) / FOLDER).joinpath(MANIFEST).is_file()), None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
