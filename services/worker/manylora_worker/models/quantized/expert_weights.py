"""Experts that a checkpoint has quantized one by one, put into stacks as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manylora_worker.models.quantized.schemes import Scheme, SchemeRefused
from manylora_worker.weights.sites import ExpertShape
from manylora_worker.weights.stacked import DOWN, GATE_UP

Parts = Mapping[str, Tensor]
_MEMBERS: Mapping[str, Sequence[str]] = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}


def codes_of(scheme: Scheme, path: str, parts: Parts) -> tuple[Tensor, ...]:
    """Raises SchemeRefused."""
    return scheme.codes(path, parts) if scheme.kind == "fp8" else scheme.words(path, parts)


def stack_experts(
    layer: str,
    shape: ExpertShape,
    scheme: Scheme,
    found: Mapping[str, Parts],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    keeps_codes: bool,
) -> dict[str, tuple[Tensor, ...]]:
    """Raises SchemeRefused."""
    # `found` are those that are quantized, by path. The others are taken out of `tensors`, stacks put in.
    # Codes that are kept are returned, by a stack's name; what is in `tensors` then has the stack's shape alone.
    kept: dict[str, tuple[Tensor, ...]] = {}
    for name, members in _MEMBERS.items():
        paths = [f"{layer}.{expert}.{member}" for expert in range(shape.experts) for member in members]
        plain = {path: tensors.pop(f"{path}.weight") for path in paths if f"{path}.weight" in tensors}
        absent = [path for path in paths if path not in found and path not in plain]
        if len(plain) + len(absent) == len(paths):  # the stack as it is, or no such layer: transformers tells of it
            tensors |= {f"{path}.weight": each for path, each in plain.items()}
            continue
        if absent:
            raise SchemeRefused(f"{absent[0]}: is missing")
        size = (shape.width, shape.hidden) if name == GATE_UP else (shape.hidden, shape.width)
        whole = (shape.experts, len(members) * size[0], size[1])
        if keeps_codes and not plain:
            kept[f"{layer}.{name}"] = _joined(scheme, {path: found[path] for path in paths}, size, shape.experts)
            tensors[f"{layer}.{name}"] = torch.zeros(1, dtype=dtype).expand(whole)
            continue
        stack = torch.empty(whole, dtype=dtype)
        for path, place in zip(paths, stack.view(-1, *size), strict=True):
            weight = plain[path] if path in plain else scheme.weight(path, found[path])
            _check(path, weight.shape, size)
            place.copy_(weight)
        tensors[f"{layer}.{name}"] = stack
    return kept


def _joined(scheme: Scheme, parts: Mapping[str, Parts], size: tuple[int, int], experts: int) -> tuple[Tensor, ...]:
    each = [codes_of(scheme, path, own) for path, own in parts.items()]
    for path, (codes, *_) in zip(parts, each, strict=True):
        _check(path, (codes.shape[0], codes.shape[1] * (2 if codes.dtype is torch.uint8 else 1)), size)
    return tuple(torch.cat(tensors).unflatten(0, (experts, -1)) for tensors in zip(*each, strict=True))


def _check(path: str, found: Sequence[int], wanted: tuple[int, int]) -> None:
    if tuple(found) != wanted:
        raise SchemeRefused(f"{path}: is a matrix of {list(found)}, in place of {list(wanted)}")
