"""Reading a PEFT adapter folder: all that is wrong with it, or its weights packed for the engine.

Owns nothing between calls, and imports no more than it needs: reader_process.py runs it in processes of its own. Only
adapter_config.json and adapter_model.safetensors are read, never a pickle, and never through a symlink; sizes are
bounded before anything is parsed. An adapter is used whole or not at all: every module that the config targets must
have its A and B, every tensor in the file must belong to such a module, and shapes must fit the base model.

A HostAdapter is immutable: one flat buffer in the model's compute type, and where each site's A and B lie in it. B is
stored transposed and scaled, A stacked by site, so that going to the device is one copy of the buffer.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from manylora_shared.adapter_files import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, adapter_uid_of, parse_config
from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterUid
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manylora_worker.adapters.lora_linear import DeviceAdapter, Site, SiteWeights, SlotWeights
from manylora_worker.adapters.peft_config import (
    LoraSettings,
    ModuleMatcher,
    PatternTimeout,
    Problems,
    parse_settings,
)

if TYPE_CHECKING:
    from manylora_worker.loader import LoadedModel

PICKLE_NAME = "adapter_model.bin"
MAX_HEADER_BYTES = 16 << 20
MAX_REPORTED = 32
"""Problems listed for one adapter; the last then says how many more there are."""

_KEY_PREFIX = "base_model.model."
_MATRICES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEPT_SCRATCH_BYTES = 256 << 20


class AdapterInvalid(InvalidRequest):
    """The adapter cannot be served on this base model; `violations` holds every reason."""


@dataclass(frozen=True)
class AdapterLimits:
    max_rank: int
    max_file_bytes: int = 4 << 30


@dataclass(frozen=True)
class AdapterBase:
    """What reading an adapter has to know of the base model. Another process can be told it."""

    names: tuple[str, ...]
    """Under which adapters may mean it, the one that it is served as first."""
    modules: Mapping[str, tuple[int, int]]
    """See loader.ModelSpec, also for the next two."""
    head_modules: frozenset[str]
    other_modules: frozenset[str]
    sites: Sequence[Site]
    dtype: torch.dtype

    @classmethod
    def of(cls, loaded: LoadedModel) -> AdapterBase:
        spec = loaded.spec
        return cls(
            names=(spec.name, spec.source_name),
            modules=spec.modules,
            head_modules=spec.head_modules,
            other_modules=spec.other_modules,
            sites=tuple(loaded.sites),
            dtype=loaded.dtype,
        )


@dataclass(frozen=True)
class _Placed:
    """A matrix in the buffer: elements [start, start + rows * columns)."""

    start: int
    rows: int
    columns: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class PlacedSite:
    site: int
    a: _Placed
    slots: tuple[tuple[int, int, int, _Placed], ...]
    """(slot, first column, last column of the stacked A product, B)"""


Layout = tuple[PlacedSite, ...]
"""Where an adapter's matrices lie in its buffer: a function of the base model's sites and the adapter's ranks."""


@dataclass(frozen=True)
class HostAdapter:
    uid: AdapterUid
    buffer: Tensor
    layout: Layout

    @property
    def size_bytes(self) -> int:
        return self.buffer.nbytes

    def on(self, device: torch.device) -> DeviceAdapter:
        """The adapter on `device`; on the host itself it shares the buffer."""
        buffer = self.buffer.to(device, non_blocking=True)
        sites = {
            placed.site: SiteWeights(
                a_t=placed.a.of(buffer).t(),
                slots=tuple(SlotWeights(slot, start, stop, b.of(buffer)) for slot, start, stop, b in placed.slots),
            )
            for placed in self.layout
        }
        return DeviceAdapter(self.uid, sites, buffer.nbytes)


@dataclass(frozen=True)
class _TensorInfo:
    dtype: str
    shape: tuple[int, ...]


def _empty(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype)


def read_adapter(
    folder: Path,
    base: AdapterBase,
    limits: AdapterLimits,
    *,
    expected_uid: AdapterUid | None = None,
    allocate: Callable[[int, torch.dtype], Tensor] = _empty,
    scratch: Scratch | None = None,
) -> HostAdapter:
    """Reads, checks and packs the adapter in `folder`.

    Args:
        expected_uid: refuse the adapter unless its content has this uid.
        allocate: memory for the weights, [elements]; called once, last of what can fail but the weights' values.
        scratch: for the file's content; None: memory that is given back.

    Raises:
        AdapterInvalid: with every reason found, MAX_REPORTED at most.
    """
    problems = Problems()
    config = _read_config(folder, problems)
    settings = None
    if config is not None:
        settings = parse_settings(config, base_names=base.names, max_rank=limits.max_rank, problems=problems)
    tensors = _read_header(folder, limits, problems)
    if tensors is not None:
        _check_tensors(tensors, settings, base, problems)
    _raise_if_any(problems)
    assert config is not None
    assert settings is not None
    assert tensors is not None
    content = _read_content(folder / WEIGHTS_NAME, limits, scratch, problems)
    _raise_if_any(problems)
    assert content is not None
    uid = adapter_uid_of(config, memoryview(content.numpy()))
    if expected_uid is not None and uid != expected_uid:
        problems.add(WEIGHTS_NAME, f"the content is not what was registered: its uid is {uid}, not {expected_uid}")
        _raise_if_any(problems)
    found = _tensors_in(content, tensors, problems)
    _raise_if_any(problems)
    adapter = _pack(found, uid, ModuleMatcher(settings), base, problems, allocate)
    _raise_if_any(problems)
    return adapter


def _raise_if_any(problems: Problems) -> None:
    found = problems.violations
    if len(found) > MAX_REPORTED:
        rest = len(found) - MAX_REPORTED + 1
        found = [*found[: MAX_REPORTED - 1], FieldViolation("adapter", f"... and {rest} more problems")]
    if found:
        raise AdapterInvalid.of_all(found)


def _regular_file_bytes(path: Path, problems: Problems, *, missing: str = "missing") -> int | None:
    """The file's size if it is a plain file, reached without a symlink; else None and a problem."""
    try:
        status = path.lstat()
    except OSError:
        problems.add(path.name, missing)
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = "a symlink" if stat.S_ISLNK(status.st_mode) else "not a plain file"
        problems.add(path.name, f"is {kind}")
        return None
    return status.st_size


def _read_config(folder: Path, problems: Problems) -> dict[str, Any] | None:
    if folder.is_symlink():
        problems.add("path", "is a symlink")
        return None
    if not folder.is_dir():
        problems.add("path", "is not a folder")
        return None
    size_bytes = _regular_file_bytes(folder / CONFIG_NAME, problems)
    if size_bytes is None:
        return None
    if size_bytes > MAX_CONFIG_BYTES:
        problems.add(CONFIG_NAME, f"has {size_bytes} bytes; the limit is {MAX_CONFIG_BYTES}")
        return None
    try:
        return parse_config((folder / CONFIG_NAME).read_bytes())
    except InvalidRequest as error:
        problems.violations += error.violations
    except OSError as error:
        problems.add(CONFIG_NAME, f"is not readable ({error})")
    return None


def _read_header(folder: Path, limits: AdapterLimits, problems: Problems) -> dict[str, _TensorInfo] | None:
    """Names, types and shapes of the tensors. The safetensors library checks the rest when it opens the file."""
    path = folder / WEIGHTS_NAME
    if folder.is_symlink() or not folder.is_dir():
        return None
    missing = "missing"
    if (folder / PICKLE_NAME).exists():
        missing = f"missing; {PICKLE_NAME} is a pickle, which is never loaded: save the adapter as safetensors"
    size_bytes = _regular_file_bytes(path, problems, missing=missing)
    if size_bytes is None:
        return None
    if size_bytes > limits.max_file_bytes:
        problems.add(WEIGHTS_NAME, f"has {size_bytes} bytes; the limit is {limits.max_file_bytes}")
        return None
    try:
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > MAX_HEADER_BYTES:
                problems.add(WEIGHTS_NAME, f"its header has {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
                return None
        with safe_open(path, framework="pt") as file:
            views = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: _TensorInfo(view.get_dtype(), tuple(view.get_shape())) for key, view in views.items()}
    except (OSError, SafetensorError) as error:
        problems.add(WEIGHTS_NAME, f"is not a readable safetensors file ({str(error)[:200]})")
        return None


def _check_tensors(
    tensors: Mapping[str, _TensorInfo], settings: LoraSettings | None, base: AdapterBase, problems: Problems
) -> None:
    """Every tensor belongs to a targeted module, every targeted module has both, and all shapes fit."""
    found: dict[str, dict[str, _TensorInfo]] = defaultdict(dict)
    for key, info in sorted(tensors.items()):
        path, matrix = _parse_key(key)
        if info.dtype not in _DTYPES:
            problems.add(key, f"has type {info.dtype}; F32, F16 and BF16 are read")
        if matrix is None:
            problems.add(key, "is not a LoRA A or B matrix of a linear layer, and nothing else can be used")
        elif path in base.head_modules:
            problems.add(key, "adapts the embeddings or the output head, which is not supported")
        elif path not in base.modules:
            problems.add(key, f"the base model has no linear layer {path}")
        else:
            found[path][matrix] = info
    for path, matrices in found.items():
        for absent in sorted({"A", "B"} - set(matrices)):
            problems.add(f"{_KEY_PREFIX}{path}.lora_{absent}.weight", "missing: its partner is there")
    if settings is not None:
        try:
            _check_targets(found, ModuleMatcher(settings), base, problems)
        except PatternTimeout:
            problems.add("target_modules", "its patterns take too long to match")


def _check_targets(
    found: Mapping[str, Mapping[str, _TensorInfo]], matcher: ModuleMatcher, base: AdapterBase, problems: Problems
) -> None:
    targeted = [path for path in base.modules if matcher.is_targeted(path, is_linear=True)]
    heads = [path for path in sorted(base.head_modules) if matcher.is_targeted(path, is_linear=False)]
    others = [path for path in sorted(base.other_modules) if matcher.is_targeted(path, is_linear=False)]
    if heads:
        problems.add("target_modules", f"targets {_some(heads)}: embeddings and the output head cannot be adapted")
    if others:
        problems.add("target_modules", f"targets {_some(others)}, not a linear layer")
    if not targeted:
        problems.add("target_modules", "matches no linear layer of the base model")
    bare = [path for path in targeted if path not in found]
    if bare:
        problems.add("target_modules", f"targets {_some(bare)}, for which {WEIGHTS_NAME} has no weights")
    wanted = set(targeted)
    for path, matrices in found.items():
        if path not in wanted:
            problems.add(f"{_KEY_PREFIX}{path}", "has weights, but target_modules does not target it")
            continue
        rank, _ = matcher.rank_and_scale(path)
        in_features, out_features = base.modules[path]
        for matrix, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            info = matrices.get(matrix)
            if info is not None and info.shape != shape:
                key = f"{_KEY_PREFIX}{path}.lora_{matrix}.weight"
                problems.add(key, f"has shape {list(info.shape)}, but {list(shape)} fits its rank and the base model")


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _parse_key(key: str) -> tuple[str, str | None]:
    """(module path, "A" or "B"), or (key, None) where the key is no LoRA matrix."""
    for suffix, matrix in _MATRICES.items():
        if key.startswith(_KEY_PREFIX) and key.endswith(suffix):
            return key[len(_KEY_PREFIX) : -len(suffix)], matrix
    return key, None


class Scratch(threading.local):
    """Each thread's buffer for weight files, so that the next one finds its memory there already: to map a file, or to
    take memory anew, is a page fault for every 4 KiB, and giving it back interrupts all threads of the process."""

    buffer: Tensor | None = None

    def take(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8; the thread's next call gives it out again."""
        if self.buffer is None or self.buffer.numel() < size_bytes:
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes > _KEPT_SCRATCH_BYTES:
                return buffer
            self.buffer = buffer
        return self.buffer[:size_bytes]


def _read_content(path: Path, limits: AdapterLimits, scratch: Scratch | None, problems: Problems) -> Tensor | None:
    """The whole file, [bytes] uint8: valid until the thread takes from `scratch` again."""
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes <= limits.max_file_bytes:
                content = _empty(size_bytes, torch.uint8) if scratch is None else scratch.take(size_bytes)
                if stream.readinto(content.numpy()) == size_bytes and not stream.read(1):
                    return content
        problems.add(WEIGHTS_NAME, "changed while it was read")
    except OSError as error:
        problems.add(WEIGHTS_NAME, f"is not readable ({error})")
    return None


def _tensors_in(content: Tensor, expected: Mapping[str, _TensorInfo], problems: Problems) -> dict[str, Tensor]:
    """Views of the file's tensors, which have to be those that its header was checked for."""
    found: dict[str, Tensor] = {}
    try:
        start = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
        header = json.loads(content[8:start].numpy().tobytes())
        header.pop("__metadata__", None)
        for key, info in expected.items():
            entry = header.pop(key)
            first, last = entry["data_offsets"]
            values, dtype = content[start + first : start + last], _DTYPES[info.dtype]
            if values.data_ptr() % dtype.itemsize:
                values = values.clone()
            found[key] = values.view(dtype).view(info.shape)
            if entry["dtype"] != info.dtype:
                raise ValueError(key)
        if header:
            raise ValueError("more tensors")
    except (ValueError, KeyError, TypeError, RuntimeError):
        problems.add(WEIGHTS_NAME, "changed while it was read")
    return found


def _pack(
    tensors: Mapping[str, Tensor],
    uid: AdapterUid,
    matcher: ModuleMatcher,
    base: AdapterBase,
    problems: Problems,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> HostAdapter:
    """Lays the matrices out by site and fills the buffer. Every tensor of the file has been checked to have a place."""
    targeted = {path for path, _ in map(_parse_key, tensors)}
    settings_of = {path: matcher.rank_and_scale(path) for path in targeted}
    ranks = {path: rank for path, (rank, _) in settings_of.items()}
    layout = lay_out(base.sites, ranks)
    end = elements_of(layout)
    buffer = allocate(end, base.dtype)
    # In two calls for all matrices: hundreds of short ones would each wait for the interpreter, and hold up steps.
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    scaled: dict[float, list[Tensor]] = defaultdict(list)
    for placed in layout:
        for slot, start, stop, b in placed.slots:
            path = base.sites[placed.site].slots[slot].path
            scale = settings_of[path][1]
            a_source = tensors[f"{_KEY_PREFIX}{path}.lora_A.weight"]
            b_source = tensors[f"{_KEY_PREFIX}{path}.lora_B.weight"].t()
            a_target, b_target = placed.a.of(buffer)[start:stop], b.of(buffer)
            if b_source.dtype is buffer.dtype and _is_exact(scale, buffer.dtype):
                scaled[scale].append(b_target)  # a product of two such numbers is rounded once, as from float32
            else:
                b_source = b_source.float() * scale
            sources += (a_source, b_source)
            targets += (a_target, b_target)
    torch._foreach_copy_(targets, sources)
    for scale, matrices in scaled.items():
        if scale != 1.0:
            torch._foreach_mul_(matrices, scale)
    if end and not all(math.isfinite(extreme) for extreme in torch.aminmax(buffer)):
        _name_unsound(buffer, layout, base, problems)
    return HostAdapter(uid, buffer, layout)


def _is_exact(value: float, dtype: torch.dtype) -> bool:
    return torch.tensor(value, dtype=dtype).item() == value


def _name_unsound(buffer: Tensor, layout: Sequence[PlacedSite], base: AdapterBase, problems: Problems) -> None:
    for placed in layout:
        for slot, start, stop, b in placed.slots:
            path = base.sites[placed.site].slots[slot].path
            for matrix, packed in (("A", placed.a.of(buffer)[start:stop]), ("B", b.of(buffer))):
                if not bool(torch.isfinite(packed).all()):
                    key = f"{_KEY_PREFIX}{path}.lora_{matrix}.weight"
                    problems.add(key, "holds NaN or infinite values (or overflows the model's number type)")


def lay_out(sites: Sequence[Site], ranks: Mapping[str, int]) -> Layout:
    """One site after the other. ranks: by module path; a module that is absent is not adapted."""
    layout: list[PlacedSite] = []
    for site in sites:
        placed = _place_site(site, ranks, elements_of(layout))
        if placed is not None:
            layout.append(placed)
    return tuple(layout)


def elements_of(layout: Sequence[PlacedSite]) -> int:
    """The length of the buffer."""
    if not layout:
        return 0
    last = layout[-1].slots[-1][3]
    return last.start + last.rows * last.columns


def ranks_by_slot(layout: Layout, sites: Sequence[Site]) -> list[int]:
    """The rank at each slot of each site, one after the other; 0 where there is none."""
    ranks = {(placed.site, slot): stop - start for placed in layout for slot, start, stop, _ in placed.slots}
    return [ranks.get((site.index, slot), 0) for site in sites for slot in range(len(site.slots))]


def _place_site(site: Site, ranks: Mapping[str, int], start: int) -> PlacedSite | None:
    """The site's place in the buffer from element `start` on: A of all its slots, then each slot's B."""
    ranked = [(i, ranks[slot.path], slot) for i, slot in enumerate(site.slots) if slot.path in ranks]
    if not ranked:
        return None
    total_rank = sum(rank for _, rank, _ in ranked)
    a = _Placed(start, total_rank, site.in_features)
    slots = []
    next_start = start + total_rank * site.in_features
    column = 0
    for i, rank, slot in ranked:
        b = _Placed(next_start, rank, slot.stop - slot.start)
        slots.append((i, column, column + rank, b))
        next_start += rank * (slot.stop - slot.start)
        column += rank
    return PlacedSite(site.index, a, tuple(slots))
