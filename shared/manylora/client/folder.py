"""A PEFT adapter's folder on this machine, checked before anything is sent, and cut into upload chunks.

Knows only what can be seen without reading tensors: the two files are there, are regular files and no symbolic links.
All else (configuration, shapes, values, base model) is the server's to check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora_shared.errors import FieldViolation, InvalidRequest

from manylora.client.types import RequestFailed

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class AdapterFolder:
    path: Path
    size_bytes: int

    @classmethod
    def open(cls, path: Path) -> AdapterFolder:
        """Raises RequestFailed with INVALID_ARGUMENT and every reason, as the server would."""
        violations = list(_violations(path))
        if violations:
            raise RequestFailed(
                InvalidRequest.code.name,
                "; ".join(f"{v.field}: {v.description}" for v in violations),
                violations=violations,
            )
        return cls(path, sum((path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE)))

    def chunks(self) -> Iterator[tuple[str, bytes]]:
        """(file name, its next bytes), at most 1 MiB each; an empty file gives one empty chunk."""
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (self.path / name).open("rb") as file:
                data = file.read(CHUNK_BYTES)
                yield name, data
                while data := file.read(CHUNK_BYTES):
                    yield name, data


def _violations(path: Path) -> Iterator[FieldViolation]:
    if path.is_symlink():
        yield FieldViolation("path", f"{path} is a symbolic link")
        return
    if not path.is_dir():
        yield FieldViolation("path", f"{path} is not a folder")
        return
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = path / name
        if file.is_symlink():
            yield FieldViolation(name, "is a symbolic link")
        elif not file.exists():
            yield FieldViolation(name, _missing(path, name))
        elif not file.is_file():
            yield FieldViolation(name, "is not a regular file")


def _missing(path: Path, name: str) -> str:
    pickled = [p for p in PICKLED_FILES if (path / p).exists()]
    if name == WEIGHTS_FILE and pickled:
        return f"the file is missing; {pickled[0]} holds pickled weights, which are refused: save them as safetensors"
    return "the file is missing"
