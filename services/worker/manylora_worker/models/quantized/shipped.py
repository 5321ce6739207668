"""Reads a quantized checkpoint's tensors and rebuilds its weights in a type that is computed in."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import WeightRenaming

from manylora_worker.models.checkpoint import renamed
from manylora_worker.models.quantized import mxfp4
from manylora_worker.models.quantized.expert_weights import codes_of, stack_experts
from manylora_worker.models.quantized.schemes import FP8, Scheme, SchemeRefused
from manylora_worker.weights.sites import ExpertShape, WholeNames

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_CODES = (FP8, torch.float8_e5m2)
_QUANTIZED = ("qweight", "weight_packed", "qzeros", "weight_scale", "weight_scale_inv", *mxfp4.PARTS)


@dataclass(frozen=True)
class Shipped:
    """Attributes:
    tensors: by name, as an unquantized checkpoint would have them.
    quantized: paths of the layers that were.
    zero_biases: names of theirs that add nothing: AutoGPTQ gives every layer one.
    codes: what layers' weights are made of (Scheme.codes, Scheme.words), where kept.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    quantized: frozenset[str] = field(repr=False)
    zero_biases: frozenset[str] = field(repr=False)
    codes: Mapping[str, tuple[Tensor, ...]] = field(repr=False)
    stacks: Mapping[str, tuple[Tensor, ...]] = field(repr=False)  # as `codes`, of experts, which are not rebuilt then


@dataclass(frozen=True)
class Paths:
    """Of a checkpoint's modules in the model that is loaded. text: of the part of it that is served; empty: all is."""

    whole: WholeNames | None = None
    unread: tuple[str, ...] = ()  # patterns of what the model has no part of
    renamings: Sequence[WeightRenaming] = ()  # transformers' own, of models that it once named otherwise
    text: str = ""
    _read: dict[str, str] = field(default_factory=dict)  # by path of ours, the checkpoint's

    def ours(self, path: str) -> str | None:  # None: it is left out
        own_path = self._renamed(path)
        if own_path is not None:
            self._read[own_path] = path
        return own_path

    def _renamed(self, path: str) -> str | None:
        path = renamed(path, self.renamings)
        if any(re.search(pattern, path) for pattern in self.unread):
            return None
        if self.whole is None:
            return path
        if any(path == other or path.startswith(f"{other}.") for other in self.whole.left_out):
            return None
        return self.whole.own_path(path)

    def is_skipped(self, path: str, scheme: Scheme) -> bool:
        """By one of its names: what quantized it may have had another transformers."""
        whole = path if self.whole is None else self.whole.path(path)
        return scheme.skips(whole) or scheme.skips(self._read.get(path, whole))

    def is_served(self, path: str) -> bool:
        return not self.text or path.startswith(f"{self.text}.")


def read_shipped(
    files: list[Path],
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    keeps_codes: bool = False,
    paths: Paths | None = None,
    experts: Mapping[str, ExpertShape] | None = None,
) -> Shipped:
    """keeps_codes: beside the weights that they stand for. Raises SchemeRefused, OSError."""
    # `experts` are those that the model has in stacks, by path
    paths, experts = paths or Paths(), experts or {}
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for file in files:
        for name, tensor in load_file(file).items():
            path, _, leaf = name.rpartition(".")
            own_path = paths.ours(path)
            if own_path is not None:
                modules[own_path][leaf] = tensor
    tensors: dict[str, Tensor] = {}
    codes: dict[str, tuple[Tensor, ...]] = {}
    of_experts: dict[str, dict[str, dict[str, Tensor]]] = defaultdict(dict)  # by their layer's path, then by their own
    quantized = set()
    shipped_bytes = sum(tensor.nbytes for parts in modules.values() for tensor in parts.values())
    for path in list(modules):
        parts = modules.pop(path)
        if _is_quantized(parts):
            own = _taken(scheme, path, parts, paths)
            quantized.add(path)
            layer = path.rpartition(".")[0].rpartition(".")[0]
            if layer in experts:
                more = [leaf for leaf, tensor in parts.items() if tensor.any()]
                if more:
                    raise SchemeRefused(f"{path}: has a {more[0]}, as the model's experts have none")
                of_experts[layer][path] = own
                continue
            if scheme.kind == "mxfp4":
                parts |= mxfp4.rebuilt_stacks(path, own, dtype)
            else:
                parts["weight"] = scheme.weight(path, own).to(dtype)
            if keeps_codes and paths.is_served(path):
                codes[path] = codes_of(scheme, path, own)
        for leaf, tensor in parts.items():
            if tensor.dtype in _CODES:
                raise SchemeRefused(f"{path}.{leaf}: is {str(tensor.dtype).removeprefix('torch.')}, and no layer's")
            tensors[f"{path}.{leaf}"] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    stacks: dict[str, tuple[Tensor, ...]] = {}
    for layer in list(of_experts):
        found = of_experts.pop(layer)
        stacks |= stack_experts(layer, experts[layer], scheme, found, tensors, dtype, keeps_codes=keeps_codes)
    _LOG.info(
        "weights are shipped quantized (%s): %d layers, %.1f MiB, which %.1f MiB in %s stand for",
        scheme.label, len(quantized), shipped_bytes / _MIB, sum(t.nbytes for t in tensors.values()) / _MIB,
        str(dtype).removeprefix("torch."),
    )  # fmt: skip
    biases = [f"{path}.bias" for path in quantized]
    zero_biases = frozenset(name for name in biases if name in tensors and not tensors[name].any())
    return Shipped(tensors, frozenset(quantized), zero_biases, codes, stacks)


def _taken(scheme: Scheme, path: str, parts: dict[str, Tensor], paths: Paths) -> dict[str, Tensor]:
    """Out of `parts`: what its weight is made of. Raises SchemeRefused."""
    if paths.is_skipped(path, scheme):
        raise SchemeRefused(f"{path}: is quantized, though quantization_config says that it is not")
    named = mxfp4.PARTS if scheme.kind == "mxfp4" else scheme.parts
    if not parts.keys() & set(named):
        raise SchemeRefused(f"{path}: {', '.join(sorted(parts))} is not what {scheme.label} writes")
    return {leaf: parts.pop(leaf) for leaf in named if leaf in parts}


def check_modules(
    scheme: Scheme, quantized: frozenset[str], linears: frozenset[str], routers: frozenset[str], paths: Paths
) -> None:
    """Raises SchemeRefused where they do not fit. linears: paths of all linear layers but the head, or with mxfp4 of
    the layers' experts.
    """
    # routers may be quantized, and need not be
    if not quantized:
        raise SchemeRefused(f"quantization_config tells {scheme.label}, and no layer is quantized")
    strange = sorted(path for path in quantized - linears - routers if paths.is_served(path))
    if strange:
        raise SchemeRefused(f"{strange[0]}: is quantized, and is no layer that is served so")
    if scheme.kind == "gptq":  # names no module: those without codes are as they were
        return
    unquantized = filter(paths.is_served, linears - quantized)
    plain = sorted(path for path in unquantized if not paths.is_skipped(path, scheme))
    if plain:
        raise SchemeRefused(f"{plain[0]}: is not quantized, and quantization_config does not name it among those")


def _is_quantized(parts: Mapping[str, Tensor]) -> bool:
    weight = parts.get("weight")
    if weight is not None and weight.dtype in (FP8, torch.float8_e5m2, torch.int8, torch.uint8):
        return True
    return any(leaf in parts for leaf in _QUANTIZED)
