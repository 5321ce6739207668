"""What a base model's folder computes, as one digest: equal for two workers that answer alike. Keeps nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from manylora_shared.process.cores import num_cores

from manylora_worker.models.checkpoint import ModelRefused, said, weight_files

_TOKEN_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_CONFIG_FILES = ("config.json", "generation_config.json")
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version")  # who wrote the file, and from where
_PART_BYTES = 32 << 20


def model_digest(folder: Path) -> str:
    """sha256 (hex) over the whole content of configuration, tokens and weights, in parts that all cores hash.

    Raises ModelRefused.
    """
    whole = hashlib.sha256()
    try:
        for name in _CONFIG_FILES:
            whole.update(f"\0{name}\0{_effective(folder / name)}\0".encode())
        files = [folder / name for name in _TOKEN_FILES if (folder / name).is_file()] + weight_files(folder)
        with ThreadPoolExecutor(num_cores()) as threads:
            parts = [part for file in files for part in _parts(file)]
            for (file, start), digest in zip(parts, threads.map(lambda part: _hashed(*part), parts), strict=True):
                whole.update(f"\0{file.name}\0{start}\0".encode() + digest)
    except OSError as error:
        raise ModelRefused(f"{folder}: {said(error)}") from error
    return whole.hexdigest()


def _effective(file: Path) -> str:
    if not file.exists():
        return ""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file}: not readable ({said(error)})") from error
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _WITHOUT_EFFECT}
    return json.dumps(content, sort_keys=True)


def _parts(file: Path) -> Iterator[tuple[Path, int]]:
    for start in range(0, max(1, file.stat().st_size), _PART_BYTES):
        yield file, start


def _hashed(file: Path, start: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return hashlib.sha256(stream.read(_PART_BYTES)).digest()
