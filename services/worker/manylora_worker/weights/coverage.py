"""What an adapter changes: which layers of the base model, at which rank, by which of its file's tensors."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from pathlib import Path

from manylora_shared.encryption.sealing import NoKeys, OpeningKeys
from manylora_shared.errors import FieldViolation
from manylora_shared.stores.adapter_files import WEIGHTS_NAME

from manylora_worker.weights.adapter_check import ChangedModule, Coverage
from manylora_worker.weights.layout import NO_EXTRAS, Extras, Layout
from manylora_worker.weights.source import (
    KEY_PREFIX,
    LENGTH_BYTES,
    MAX_REPORTED,
    AdapterBase,
    AdapterInvalid,
    open_adapter_file,
)

_MAX_LEFT_OUT = 16  # that are named


def coverage_of(
    folder: Path, layout: Layout, base: AdapterBase, extras: Extras = NO_EXTRAS, keys: OpeningKeys | None = None
) -> Coverage:
    """Of a file that a reader found good. Raises AdapterInvalid where a tensor belongs to nothing that is computed."""
    names = _tensor_names(folder / WEIGHTS_NAME, base, keys or NoKeys())
    base = base.named_as(names)
    ranks = {base.sites[vector.site].slots[vector.slot].path: 0 for vector in extras.vectors}
    for tokens in extras.tokens:
        ranks[base.tokens.embeddings if tokens.embeds else base.tokens.head] = 0
    for placed in layout:
        ranks |= {base.sites[placed.site].slots[slot].path: stop - start for slot, start, stop, _ in placed.slots}
    modules = sorted({ChangedModule(_shown(path, base), rank) for path, rank in ranks.items()})
    paths = ranks.keys() | base.experts.keys()
    left_out = [name for name in names if any(_lies_under(name, part) for part in base.left_out)]
    unused = [name for name in names if name not in set(left_out) and not _belongs(name, paths)]
    if unused:
        raise AdapterInvalid.of_all(
            [FieldViolation(name[:400], "changes nothing that is computed") for name in unused[:MAX_REPORTED]]
        )
    num_layers = len({_shown(path, base) for path in base.modules})
    return Coverage(modules, num_layers, len(names), len(left_out), tuple(left_out[:_MAX_LEFT_OUT]))


def _shown(path: str, base: AdapterBase) -> str:
    """One for all experts of a layer."""
    if not base.is_of_expert(path):
        return path
    expert, _, leaf = path.rpartition(".")
    return f"{expert.rpartition('.')[0]}.*.{leaf}"


def _lies_under(name: str, part: str) -> bool:
    return name.startswith(f"{KEY_PREFIX}{part}.")


def _belongs(name: str, paths: AbstractSet[str]) -> bool:
    parts = name.removeprefix(KEY_PREFIX).split(".")
    return name.startswith(KEY_PREFIX) and any(".".join(parts[:n]) in paths for n in range(1, len(parts)))


def _tensor_names(path: Path, base: AdapterBase, keys: OpeningKeys) -> list[str]:
    with open_adapter_file(path, keys) as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(min(header_bytes, base.max_header_bytes)))
    return sorted(name for name in header if name != "__metadata__")
