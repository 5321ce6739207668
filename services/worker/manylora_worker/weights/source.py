"""Reading a PEFT adapter folder: all that is wrong with it, or its weights packed for the engine.

Owns nothing between calls, and imports little: reader_process.py runs it too. It reads only adapter_config.json and
adapter_model.safetensors, never through a symlink; sizes are bounded before anything is parsed. An adapter is used
whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from manylora_shared.encryption.sealing import NoKeys, OpeningKeys, SealBroken
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterUid, adapter_uid, digest_of, owner_of
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    digest_of_content,
    parse_config,
)
from manylora_shared.stores.adapter_rope import ROPE_KEY, BaseRope, RopeScaling
from manylora_shared.stores.stored_files import StoredFile, stored_file
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manylora_worker.weights.layout import HostAdapter, VectorKind, lies_in
from manylora_worker.weights.packing import (
    ModuleTokens,
    ModuleVector,
    ModuleWeights,
    Packing,
    Scratch,
    StoredMatrix,
    kind_of,
)
from manylora_worker.weights.peft_config import (
    TOKENS_KEY,
    LoraSettings,
    ModuleMatcher,
    Problems,
    parse_settings,
    some_of,
    trained_tokens,
    unused,
)
from manylora_worker.weights.sites import ExpertShape, Site, TokenBase, WholeNames
from manylora_worker.weights.stacked import DOWN, GATE_UP, Stack, is_stack_key, stacks_of, without_weights

PICKLE_NAME = "adapter_model.bin"
MAX_HEADER_BYTES = 2 << 20  # or as many as the model's linear layers take, if that is more
_HEADER_BYTES_A_LAYER = 512
MAX_TENSORS = 4096  # or four for each of the model's linear layers, if that is more
_COMMAS_A_TENSOR = 5
_MORE_COMMAS = 8192  # of the header's metadata
MAX_REPORTED = 32  # problems listed for one adapter; the last then says how many more there are

KEY_PREFIX = "base_model.model."
_MATRICES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_VECTORS = {
    ".lora_magnitude_vector": VectorKind.MAGNITUDE,
    ".lora_magnitude_vector.weight": VectorKind.MAGNITUDE,
    ".lora_B.bias": VectorKind.LOW_RANK_BIAS,
    ".base_layer.bias": VectorKind.BIAS,
    ".bias": VectorKind.BIAS,
}
TOKENS = "tokens"  # what a key is of, as A and B
_TOKENS = {".token_adapter.trainable_tokens_delta": TOKENS}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LENGTH_BYTES = 8  # of a safetensors header, in front of it
_CHANGED = "changed while it was read"


class AdapterInvalid(InvalidRequest):
    """`violations` holds every reason."""


@dataclass(frozen=True)
class AdapterLimits:
    max_rank: int
    max_file_bytes: int = 4 << 30


@dataclass(frozen=True)
class AdapterBase:
    """What reading an adapter needs to know of the base model. It can be sent to another process."""

    names: tuple[str, ...]  # accepted in adapters' configs; the served name first
    modules: Mapping[str, tuple[int, int]]  # path -> (in, out), see loader.ModelSpec, also for the next two
    head_modules: frozenset[str]
    other_modules: frozenset[str]
    sites: Sequence[Site]
    dtype: torch.dtype
    left_out: tuple[str, ...] = ()  # an adapter's weights for these have no effect on text
    rope: BaseRope = field(default_factory=BaseRope)
    head: str = ""  # of `modules`, the output head; empty: it cannot be adapted
    biased: frozenset[str] = frozenset()  # of `modules`, those with a bias
    vectors_problem: str = ""  # why no adapter may scale or shift outputs; empty: it may
    experts: Mapping[str, ExpertShape] = field(default_factory=dict)  # path -> of each layer's, whose are in `modules`
    tokens: TokenBase = field(default_factory=TokenBase)
    composes_experts: bool = True  # adapters that change experts, with others in one request
    whole: WholeNames | None = None

    def named_as(self, keys: Iterable[str]) -> AdapterBase:
        """By the paths of an adapter's keys: those of the whole model, if it was trained on that."""
        if self.whole is None or not self.whole.is_meant(key.removeprefix(KEY_PREFIX) for key in keys):
            return self
        return replace(self, left_out=self.whole.left_out, **self.whole.renamed(vars(self)))

    @property
    def max_header_bytes(self) -> int:
        return max(MAX_HEADER_BYTES, _HEADER_BYTES_A_LAYER * len(self.modules))

    def is_of_expert(self, path: str) -> bool:
        stack, _, _ = path.rpartition(".")
        return stack.rpartition(".")[0] in self.experts

    def is_by_parameter(self, path: str) -> bool:
        """A router or an expert that is no layer of the model: `target_parameters` alone can name it."""
        parent, _, _ = path.rpartition(".")
        shape = self.experts.get(parent.rpartition(".")[0], self.experts.get(f"{parent}.experts"))
        return shape is not None and shape.in_turn


@dataclass(frozen=True)
class _TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    first_byte: int  # in the file

    @property
    def stored(self) -> StoredMatrix:
        rows, columns = self.shape if len(self.shape) == 2 else (1, *self.shape)
        return StoredMatrix(_DTYPES[self.dtype], rows, columns, self.first_byte)


def _empty(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype)


def read_adapter(
    folder: Path,
    base: AdapterBase,
    limits: AdapterLimits,
    *,
    uid: AdapterUid | None = None,
    allocate: Callable[[int, torch.dtype], Tensor] = _empty,
    scratch: Scratch | None = None,
    keys: OpeningKeys | None = None,
) -> HostAdapter:
    """
    Args:
        uid: what it shall be; content with another digest is refused.
        allocate: memory for the weights, [elements]. Called after every check but that of the weights' values.
        scratch: of reads with the same base and limits; None: nothing is kept.
        keys: for files that are sealed.

    Raises:
        AdapterInvalid: with every reason found, MAX_REPORTED at most.
        Sealed, ServiceUnavailable: the key of a sealed file is not to be had.
    """
    problems = Problems()
    scratch = scratch or Scratch()
    opening = keys or NoKeys()
    config_text = _read_config(folder, opening, problems)
    with ExitStack() as files:
        weights = _open_weights(folder, base, limits, opening, files, problems)
        kind = packing = None
        if config_text is not None and weights is not None:
            owner = owner_of(uid) if uid is not None else None
            kind = kind_of(owner, config_text, weights.header, weights.size_bytes)
            packing = scratch.packing(kind)
        if packing is None:
            packing = _check(config_text, weights, base, limits, problems)
        _raise_if_any(problems)
        assert kind is not None
        assert packing is not None
        assert weights is not None
        content = weights.read(scratch, problems)
    _raise_if_any(problems)
    assert content is not None
    digest = digest_of_content(packing.config, memoryview(content.numpy()))
    if uid is not None and digest != digest_of(uid):
        problems.add(
            WEIGHTS_NAME, f"the content is not what was registered: its digest is {digest}, not {digest_of(uid)}"
        )
        _raise_if_any(problems)
    adapter = packing.pack(content, uid or adapter_uid(digest, None), allocate)
    if adapter.buffer.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(adapter.buffer)):
        _name_unsound(adapter, base, problems)
        _raise_if_any(problems)
    scratch.keep(kind, packing)
    return adapter


def _raise_if_any(problems: Problems) -> None:
    if problems.violations:
        raise AdapterInvalid.of_all(problems.first(MAX_REPORTED))


def _is_regular_file(path: Path, problems: Problems, *, missing: str = "missing") -> bool:
    """Else there is a problem, also where it is reached through a symlink."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        problems.add(path.name, missing)
        return False
    if not stat.S_ISREG(mode):
        problems.add(path.name, f"is {'a symlink' if stat.S_ISLNK(mode) else 'not a plain file'}")
        return False
    return True


def _read_config(folder: Path, keys: OpeningKeys, problems: Problems) -> bytes | None:
    if folder.is_symlink():
        problems.add("path", "is a symlink")
        return None
    if not folder.is_dir():
        problems.add("path", "is not a folder")
        return None
    path = folder / CONFIG_NAME
    if not _is_regular_file(path, problems):
        return None
    try:
        with open_adapter_file(path, keys) as file:
            if file.plain_bytes <= MAX_CONFIG_BYTES:
                return file.read(MAX_CONFIG_BYTES + 1)
            problems.add(CONFIG_NAME, f"has {file.plain_bytes} bytes; the limit is {MAX_CONFIG_BYTES}")
    except SealBroken as error:
        problems.add_all(error, CONFIG_NAME)
    except OSError as error:
        problems.add(CONFIG_NAME, f"is not readable ({error})")
    return None


def open_adapter_file(path: Path, keys: OpeningKeys) -> StoredFile:
    """Raises OSError, SealBroken, Sealed, ServiceUnavailable."""
    return stored_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path.name, keys)


@dataclass(frozen=True)
class _WeightFile:
    stream: StoredFile
    size_bytes: int
    header: bytes  # JSON

    def read(self, scratch: Scratch, problems: Problems) -> Tensor | None:
        """[bytes] uint8, valid until the thread takes from `scratch` again."""
        try:
            content = scratch.take(self.size_bytes)
            if self.stream.fill(content.numpy()):
                start = LENGTH_BYTES + len(self.header)
                if content[LENGTH_BYTES:start].numpy().tobytes() == self.header:
                    return content
            problems.add(WEIGHTS_NAME, _CHANGED)
        except SealBroken as error:
            problems.add_all(error, WEIGHTS_NAME)
        except OSError as error:
            problems.add(WEIGHTS_NAME, f"is not readable ({error})")
        return None


def _open_weights(
    folder: Path, base: AdapterBase, limits: AdapterLimits, keys: OpeningKeys, files: ExitStack, problems: Problems
) -> _WeightFile | None:
    """`files` closes it."""
    path = folder / WEIGHTS_NAME
    if folder.is_symlink() or not folder.is_dir():
        return None
    missing = "missing"
    if (folder / PICKLE_NAME).exists():
        missing = f"missing; {PICKLE_NAME} is a pickle, which is never loaded: save the adapter as safetensors"
    if not _is_regular_file(path, problems, missing=missing):
        return None
    try:
        stream = files.enter_context(open_adapter_file(path, keys))
        if stream.plain_bytes > limits.max_file_bytes:
            problems.add(WEIGHTS_NAME, f"has {stream.plain_bytes} bytes; the limit is {limits.max_file_bytes}")
            return None
        header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if header_bytes > base.max_header_bytes:
            problems.add(WEIGHTS_NAME, f"its header has {header_bytes} bytes; the limit is {base.max_header_bytes}")
            return None
        weights = _WeightFile(stream, stream.plain_bytes, stream.read(header_bytes))
        # Counted before anything is parsed: each tensor opens a brace, beside the header and its metadata.
        num_tensors, limit = weights.header.count(b"{") - 2, max(MAX_TENSORS, 4 * len(base.modules))
        if num_tensors > limit:
            problems.add(WEIGHTS_NAME, f"its header names {num_tensors} tensors; the limit is {limit}")
        elif weights.header.count(b",") > _COMMAS_A_TENSOR * limit + _MORE_COMMAS:
            problems.add(WEIGHTS_NAME, f"its header has more values than those of {limit} tensors")
        else:
            return weights
    except SealBroken as error:
        problems.add_all(error, WEIGHTS_NAME)
    except OSError as error:
        problems.add(WEIGHTS_NAME, f"is not readable ({error})")
    return None


def _check(
    config_text: bytes | None,
    weights: _WeightFile | None,
    base: AdapterBase,
    limits: AdapterLimits,
    problems: Problems,
) -> Packing | None:
    """None where anything but the weights' values is wrong."""
    config = settings = rope = None
    if config_text is not None:
        try:
            config = parse_config(config_text)
            settings = parse_settings(config, base_names=base.names, max_rank=limits.max_rank, problems=problems)
            rope = _rope(config, base, problems)
        except InvalidRequest as error:
            problems.violations += error.violations
    tensors = None if weights is None else _tensors_of(weights, problems)
    base = base.named_as(tensors or ())
    if settings is not None and settings.has_vectors and base.vectors_problem:
        problems.add(settings.has_vectors, base.vectors_problem)
    found = _Found({}, {}, {}) if tensors is None else _check_tensors(tensors, settings, base, problems)
    if problems.violations:
        return None
    assert config is not None
    assert tensors is not None
    modules = dict(found.stacked)
    for path, scale in found.scales.items():
        a, b = (tensors[f"{KEY_PREFIX}{path}.lora_{matrix}.weight"].stored for matrix in _MATRICES.values())
        modules[path] = ModuleWeights(a, b, scale)
    placed = [
        ModuleVector(path, kind, tensors[key].stored, found.scales[path] if kind is VectorKind.LOW_RANK_BIAS else 1.0)
        for (path, kind), key in sorted(found.vectors.items())
    ]
    return Packing.of(config, modules, base.sites, base.dtype, rope, placed, found.tokens)


def _rope(config: Mapping[str, Any], base: AdapterBase, problems: Problems) -> RopeScaling | None:
    try:
        return base.rope.scaling_of(config)
    except ValueError as error:
        problems.add(ROPE_KEY, str(error))
    return None


def _tensors_of(weights: _WeightFile, problems: Problems) -> dict[str, _TensorInfo] | None:
    """Read only after the safetensors library has found the file sound."""
    try:
        with _outline(weights) as path, safe_open(path, framework="pt") as file:
            views = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            seen = {key: (view.get_dtype(), list(view.get_shape())) for key, view in views.items()}
    except (OSError, SafetensorError) as error:
        problems.add(WEIGHTS_NAME, f"is not a readable safetensors file ({str(error)[:200]})")
        return None
    try:
        entries = json.loads(weights.header)
        entries.pop("__metadata__", None)
        start = LENGTH_BYTES + len(weights.header)
        found = {key: (entry["dtype"], entry["shape"]) for key, entry in entries.items()}
        size_bytes = weights.size_bytes - start
        if found == seen and all(lies_in(size_bytes, _DTYPES.get(each["dtype"]), each) for each in entries.values()):
            return {
                key: _TensorInfo(entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
                for key, entry in entries.items()
            }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    problems.add(WEIGHTS_NAME, _CHANGED)
    return None


@contextmanager
def _outline(weights: _WeightFile) -> Iterator[str]:
    """A file with its header and its length, and nothing behind: what the library looks at is in the clear."""
    with open(os.memfd_create("manylora-outline", os.MFD_CLOEXEC), "wb") as file:
        file.write(len(weights.header).to_bytes(LENGTH_BYTES, "little") + weights.header)
        file.truncate(weights.size_bytes)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


@dataclass(frozen=True)
class _Found:
    scales: Mapping[str, float]  # by path
    vectors: Mapping[tuple[str, VectorKind], str]  # their keys
    stacked: Mapping[str, ModuleWeights]  # by path, of experts whose weights stand in stacks
    tokens: Sequence[ModuleTokens] = ()


def _check_tensors(
    tensors: Mapping[str, _TensorInfo], settings: LoraSettings | None, base: AdapterBase, problems: Problems
) -> _Found:
    """Every tensor belongs to a targeted module, every targeted module has both, all shapes fit."""
    found: dict[str, dict[str, _TensorInfo]] = defaultdict(dict)
    stacks: dict[str, dict[str, _TensorInfo]] = defaultdict(dict)
    vectors: dict[tuple[str, VectorKind], str] = {}
    rows: dict[str, _TensorInfo] = {}
    for key, info in sorted(tensors.items()):
        path, matrix = parse_key(key)
        if info.dtype not in _DTYPES:
            problems.add(key, f"has type {info.dtype}; F32, F16 and BF16 are read")
        if isinstance(matrix, VectorKind):
            if not any(path.startswith(f"{part}.") for part in base.left_out):
                vectors[path, matrix] = key
        elif matrix == TOKENS:
            rows[path] = info
        elif matrix is None:
            problems.add(key, unused(key))
        elif path in base.head_modules:
            problems.add(key, "adapts the embeddings or the output head, which is not supported")
        elif any(path.startswith(f"{part}.") for part in base.left_out):
            continue
        elif is_stack_key(path, base.experts):
            stacks[path][matrix] = info
        elif path not in base.modules or (base.is_of_expert(path) and base.is_by_parameter(path)):
            problems.add(key, f"the base model has no linear layer {path}")
        else:
            found[path][matrix] = info
    for path, matrices in (found | stacks).items():
        for absent in sorted({"A", "B"} - set(matrices)):
            problems.add(f"{KEY_PREFIX}{path}.lora_{absent}.weight", "missing: its partner is there")
    if settings is not None:
        try:
            matcher = ModuleMatcher(settings)
            scales = _check_targets(found, matcher, base, problems)
            stacked = _check_stacks(stacks, matcher, base, problems)
            _check_parameters(settings, base, problems)
            _check_vectors(vectors, tensors, scales, settings, base, problems)
            return _Found(scales, vectors, stacked, _check_tokens(rows, settings, scales, base, problems))
        except InvalidRequest as error:  # a pattern's
            problems.add_all(error, "target_modules")
    return _Found({}, {}, {})


def _check_tokens(
    rows: Mapping[str, _TensorInfo],
    settings: LoraSettings,
    scales: Mapping[str, float],
    base: AdapterBase,
    problems: Problems,
) -> list[ModuleTokens]:
    tokens = trained_tokens(settings, base.tokens, {path: info.shape for path, info in rows.items()}, problems)
    if base.head in scales and any(each.heads for each in tokens):
        problems.add(TOKENS_KEY, "tokens of an output head that has LoRA, too, are not served")
    return [ModuleTokens(each.ids, each.embeds, each.heads, rows[each.path].stored) for each in tokens]


def _check_stacks(
    found: Mapping[str, Mapping[str, _TensorInfo]], matcher: ModuleMatcher, base: AdapterBase, problems: Problems
) -> dict[str, ModuleWeights]:
    """found: by the paths of keys. By the path of each expert's linear layers."""
    modules: dict[str, ModuleWeights] = {}
    stacks = list(_stacks(matcher, base))
    for key in sorted(found.keys() - {stack.key for stack in stacks}):
        problems.add(f"{KEY_PREFIX}{key}", "has weights, but target_parameters does not target it")
    bare = [stack.name for stack in stacks if stack.key not in found]
    if bare:
        problems.add("target_parameters", f"targets {some_of(bare)}, for which {WEIGHTS_NAME} has no weights")
    for stack in stacks:
        own = found.get(stack.key, {})
        rank, scale = matcher.rank_and_scale(stack.name)
        fit = [_has_shape(stack.key, own.get(each), each, stack.matrix_shape(each, rank), problems) for each in "AB"]
        if own.keys() == {"A", "B"} and all(fit):
            modules.update(stack.modules(own["A"].stored, own["B"].stored, rank, scale))
    return modules


def _stacks(matcher: ModuleMatcher, base: AdapterBase) -> Iterator[Stack]:
    for path, shape in base.experts.items():
        names = [each for each in (GATE_UP, DOWN) if matcher.is_parameter_targeted(f"{path}.{each}")]
        yield from stacks_of(path, shape, names)


def _has_shape(path: str, info: _TensorInfo | None, matrix: str, shape: tuple[int, int], problems: Problems) -> bool:
    if info is None or info.shape == shape:
        return True
    key = f"{KEY_PREFIX}{path}.lora_{matrix}.weight"
    problems.add(key, f"has shape {list(info.shape)}, but {list(shape)} fits its rank and the base model")
    return False


def _check_parameters(settings: LoraSettings, base: AdapterBase, problems: Problems) -> None:
    """Each name is that of a weight which can be adapted."""
    if not settings.target_parameters:
        return
    weights = {f"{path}.weight" for path in base.modules if not base.is_of_expert(path)}
    weights |= {f"{path}.{name}" for path in base.experts for name in (GATE_UP, DOWN)}
    ends = {name[at:] for name in weights for at in (0, *(i + 1 for i, c in enumerate(name) if c == "."))}
    unknown = sorted(set(settings.target_parameters) - ends)
    if unknown:
        problems.add("target_parameters", f"{some_of(unknown)}: no weight of a linear layer or of experts")


def _check_vectors(
    vectors: Mapping[tuple[str, VectorKind], str],
    tensors: Mapping[str, _TensorInfo],
    scales: Mapping[str, float],
    settings: LoraSettings,
    base: AdapterBase,
    problems: Problems,
) -> None:
    """Those that the configuration tells of, and no others, for layers that have what they go with."""
    told = {
        VectorKind.MAGNITUDE: (settings.use_dora, "use_dora", scales.keys()),
        VectorKind.LOW_RANK_BIAS: (settings.lora_bias, "lora_bias", scales.keys()),
        VectorKind.BIAS: (settings.trains_biases, "bias", base.biased),
    }
    for (path, kind), key in vectors.items():
        is_told, name, paths = told[kind]
        if path not in base.modules:
            problems.add(key, f"the base model has no linear layer {path}")
        elif not is_told:
            problems.add(key, f"is there, but {name} does not say so")
        elif path == base.head:
            problems.add(key, "scales or shifts the output head, which is not served")
        elif base.is_of_expert(path):
            problems.add(key, "scales or shifts the outputs of an expert, which is not served")
        elif path not in paths:
            problems.add(
                key, "belongs to a layer without LoRA" if kind is not VectorKind.BIAS else "its layer has none"
            )
        elif tensors[key].shape != base.modules[path][1:]:
            problems.add(
                key, f"has shape {list(tensors[key].shape)}, but [{base.modules[path][1]}] fits the base model"
            )
    for kind, (is_told, name, paths) in told.items():
        bare = sorted(path for path in paths if (path, kind) not in vectors) if is_told else []
        if bare and kind is not VectorKind.BIAS:
            problems.add(name, f"{some_of(bare)} have none in {WEIGHTS_NAME}")


def _check_targets(
    found: Mapping[str, Mapping[str, _TensorInfo]], matcher: ModuleMatcher, base: AdapterBase, problems: Problems
) -> dict[str, float]:
    scales: dict[str, float] = {}
    by_weight = {
        path for path in base.modules if matcher.is_parameter_targeted(f"{path}.weight") and not base.is_of_expert(path)
    }
    targeted = [
        path
        for path in base.modules
        if path in by_weight
        or (not base.is_by_parameter(path) and matcher.is_targeted(path, is_linear=path != base.head))
    ]
    heads = [path for path in sorted(base.head_modules) if matcher.is_targeted(path, is_linear=False)]
    others = [path for path in sorted(base.other_modules) if matcher.is_targeted(path, is_linear=False)]
    if heads:
        problems.add("target_modules", f"targets {some_of(heads)}: embeddings and the output head cannot be adapted")
    if others:
        problems.add("target_modules", f"targets {some_of(others)}, not a linear layer")
    if not targeted and not any(_stacks(matcher, base)):
        problems.add("target_modules", "matches no linear layer of the base model")
    bare = without_weights(targeted, found.keys(), base.is_of_expert)
    if bare:
        problems.add("target_modules", f"targets {some_of(bare)}, for which {WEIGHTS_NAME} has no weights")
    wanted = set(targeted)
    for path, matrices in found.items():
        if path not in wanted:
            problems.add(f"{KEY_PREFIX}{path}", "has weights, but target_modules does not target it")
            continue
        rank, scales[path] = matcher.rank_and_scale(f"{path}.weight" if path in by_weight else path)
        in_features, out_features = base.modules[path]
        for matrix, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            _has_shape(path, matrices.get(matrix), matrix, shape, problems)
    return scales


def parse_key(key: str) -> tuple[str, str | None]:
    """(module path, "A", "B", TOKENS or a VectorKind), or (key, None) where the key is nothing of LoRA's."""
    for suffix, matrix in (_MATRICES | _VECTORS | _TOKENS).items():
        if key.startswith(KEY_PREFIX) and key.endswith(suffix):
            return key[len(KEY_PREFIX) : -len(suffix)], matrix
    return key, None


def _name_unsound(adapter: HostAdapter, base: AdapterBase, problems: Problems) -> None:
    buffer = adapter.buffer
    for tokens in adapter.extras.tokens:
        if not bool(torch.isfinite(tokens.placed.of(buffer)).all()):
            problems.add(TOKENS_KEY, "a token's row holds NaN or infinite values")
    for vector in adapter.extras.vectors:
        if not bool(torch.isfinite(vector.placed.of(buffer)).all()):
            path = base.sites[vector.site].slots[vector.slot].path
            problems.add(f"{KEY_PREFIX}{path}", f"its {vector.kind} holds NaN or infinite values")
    for placed in adapter.layout:
        for slot, start, stop, b in placed.slots:
            path = base.sites[placed.site].slots[slot].path
            for matrix, packed in (("A", placed.a.of(buffer)[start:stop]), ("B", b.of(buffer))):
                if not bool(torch.isfinite(packed).all()):
                    key = f"{KEY_PREFIX}{path}.lora_{matrix}.weight"
                    problems.add(key, "holds NaN or infinite values (or overflows the model's number type)")
