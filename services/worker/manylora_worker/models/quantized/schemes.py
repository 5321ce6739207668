"""Weights that a checkpoint ships quantized: what its `quantization_config` says of them, and what they stand for.

Products of a weight's code, zero and scale are of 32-bit floats. Activations are not quantized, whatever it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_PLAIN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs 0 .. 7 stand in a word, from its low bits on
_WORDS = frozenset({"qweight", "qzeros", "weight_packed", "weight_zero_point"})


class SchemeRefused(ValueError): ...


@dataclass(frozen=True)
class Scheme:
    """skipped: modules that are as they were."""

    label: str
    kind: Literal["fp8", "awq", "gptq", "packed", "mxfp4"]
    skipped: tuple[str, ...] = ()
    block: tuple[int, int] | None = None  # of fp8: outputs and inputs that have one scale
    group_size: int = 0  # of 4 bits: inputs that have one scale; 0: all of them
    adds_one: bool = False  # gptq's zeros are stored less one
    has_zeros: bool = True  # of packed

    @property
    def parts(self) -> Sequence[str]:
        if self.kind == "fp8":
            return ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
        if self.kind == "packed":
            return ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        return ("qweight", "qzeros", "scales", "g_idx")

    @property
    def inputs_of_scale(self) -> int:
        """0: all of them."""
        return self.group_size if self.block is None else self.block[1]

    def skips(self, path: str) -> bool:
        return any(_names(entry, path) for entry in self.skipped)

    def weight(self, path: str, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 [out, in]. Raises SchemeRefused."""
        if self.kind == "fp8":
            codes, scales = self.codes(path, parts)
            inputs = codes.shape[1]
            return codes.float() * scales.repeat_interleave(self.inputs_of_scale or inputs, dim=1)[:, :inputs]
        return self._of_words(path, parts)

    def codes(self, path: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """FP8 [out, in], and scales float32 [out, groups of inputs]. Raises SchemeRefused."""
        codes = parts["weight"]
        scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
        if codes.dtype != FP8 or codes.dim() != 2 or scale is None:
            raise SchemeRefused(f"{path}: is not a matrix of float8_e4m3fn with a weight_scale_inv or weight_scale")
        outputs, inputs = codes.shape
        scale = scale.float()
        if self.block is not None:
            rows, columns = self.block
            if scale.shape != (-(-outputs // rows), -(-inputs // columns)):
                raise SchemeRefused(f"{path}: scales {list(scale.shape)} do not fit blocks of {rows} x {columns}")
            return codes, scale.repeat_interleave(rows, dim=0)[:outputs].contiguous()
        if scale.numel() not in (1, outputs):
            raise SchemeRefused(f"{path}: scales {list(scale.shape)} are neither one nor one an output")
        return codes, scale.reshape(-1, 1).expand(outputs, 1).contiguous()

    def words(self, path: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and shifts as Int4Weight has them. Raises SchemeRefused."""
        codes, zeros, scales, group = self._in_groups(path, parts)
        inputs, size = codes.shape[0], codes.shape[0] // scales.shape[0]
        if inputs % scales.shape[0] or not torch.equal(group, torch.arange(inputs) // size):
            raise SchemeRefused(
                f"{path}: its groups are not of neighbouring inputs (desc_act), as --quantization int4 needs"
            )
        packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
        return packed.T.contiguous(), scales.T.contiguous(), ((8 - zeros).float() * scales).T.contiguous()

    def _of_words(self, path: str, parts: Mapping[str, Tensor]) -> Tensor:
        codes, zeros, scales, group = self._in_groups(path, parts)
        return ((codes - zeros[group]).float() * scales[group]).T.contiguous()

    def _in_groups(self, path: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes [in, out], zeros and scales [groups, out], and each input's group."""
        codes, zeros, scales = (self._packed if self.kind == "packed" else self._read_words)(path, parts)
        inputs = codes.shape[0]
        size = self.group_size or inputs
        groups = -(-inputs // size)
        if codes.shape[1] != scales.shape[1] or zeros.shape != scales.shape or scales.shape[0] != groups:
            told = ", ".join(f"{name} {list(each.shape)}" for name, each in parts.items() if each.dim() == 2)
            raise SchemeRefused(f"{path}: {told} do not fit groups of {size} inputs")
        told_group = parts.get("g_idx", parts.get("weight_g_idx"))
        group = torch.arange(inputs) // size if told_group is None else told_group.long()
        if group.shape != (inputs,) or int(group.min()) < 0 or int(group.max()) >= groups:
            raise SchemeRefused(f"{path}: g_idx does not name a group of each of {inputs} inputs")
        return codes, zeros, scales, group

    def _packed(self, path: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self._need(path, parts, "weight_packed", "weight_scale", "weight_shape")
        outputs, inputs = (int(n) for n in parts["weight_shape"].tolist())
        words, scales = parts["weight_packed"], parts["weight_scale"].float()
        if words.shape != (outputs, -(-inputs // 8)) or scales.dim() != 2:
            raise SchemeRefused(
                f"{path}: weight_packed {list(words.shape)} and weight_scale {list(scales.shape)} do not fit a weight "
                f"of {outputs} x {inputs}"
            )
        zeros = torch.full(scales.shape, 8, dtype=torch.int32)  # codes are stored with 8 added
        if self.has_zeros:
            self._need(path, parts, "weight_zero_point")
            zeros = _unpacked(parts["weight_zero_point"], 0, _PLAIN_ORDER)[:outputs]
        return _unpacked(words, 1, _PLAIN_ORDER)[:, :inputs].T, zeros.T, scales.T

    def _read_words(self, path: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self._need(path, parts, "qweight", "qzeros", "scales")
        words, scales = parts["qweight"], parts["scales"].float()
        order = _AWQ_ORDER if self.kind == "awq" else _PLAIN_ORDER
        codes = _unpacked(words, 1 if self.kind == "awq" else 0, order)
        zeros = _unpacked(parts["qzeros"], 1, order)
        if self.adds_one:
            zeros = (zeros + 1) & 15
        return codes, zeros, scales

    def _need(self, path: str, parts: Mapping[str, Tensor], *names: str) -> None:
        absent = [name for name in names if name not in parts]
        if absent:
            raise SchemeRefused(f"{path}: has no {' and no '.join(absent)}")
        for name in (each for each in names if each in _WORDS):
            if parts[name].dtype != torch.int32 or parts[name].dim() != 2:
                raise SchemeRefused(f"{path}.{name}: is not a matrix of 32-bit words")


def scheme_of(stated: Mapping[str, Any]) -> Scheme:
    """stated: a `quantization_config`. Raises SchemeRefused with what there is that cannot be read."""
    method = stated.get("quant_method")
    if method == "fp8":
        return _fp8(stated)
    if method == "compressed-tensors":
        return _compressed_tensors(stated)
    if method in ("awq", "gptq"):
        return _four_bits(method, stated)
    if method == "mxfp4":
        return Scheme("mxfp4 experts", "mxfp4", skipped=_entries(stated, "modules_to_not_convert"))
    raise SchemeRefused(f"{method or 'an unnamed method'}: only fp8, compressed-tensors, awq, gptq and mxfp4 are read")


def _fp8(stated: Mapping[str, Any]) -> Scheme:
    _expect(stated, "fmt", "e4m3", default="e4m3")
    block = _block(stated.get("weight_block_size"))
    return Scheme(
        "fp8, one scale a weight" if block is None else f"fp8, blocks of {block[0]} x {block[1]}",
        "fp8",
        skipped=_entries(stated, "modules_to_not_convert", "ignored_layers"),
        block=block,
    )


def _compressed_tensors(stated: Mapping[str, Any]) -> Scheme:
    packs = stated.get("format") == "pack-quantized"
    if not packs:
        _expect(stated, "format", "float-quantized", more=" or 'pack-quantized'")
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if stated.get(field):
            raise SchemeRefused(f"compressed-tensors: {field} is not read")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise SchemeRefused("compressed-tensors: exactly one of config_groups is read")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        raise SchemeRefused("compressed-tensors: its group must tell the weights of the targets ['Linear']")
    _expect(weights, "dynamic", False, default=False)
    if packs:
        return _packed_integers(stated, weights)
    _expect(weights, "num_bits", 8)
    _expect(weights, "type", "float")
    _expect(weights, "symmetric", True, default=True)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise SchemeRefused(f"compressed-tensors: strategy {strategy!r}: only tensor, channel and block are read")
    return Scheme(
        f"compressed-tensors fp8, a scale a {strategy}",
        "fp8",
        skipped=_entries(stated, "ignore"),
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
    )


def _packed_integers(stated: Mapping[str, Any], weights: Mapping[str, Any]) -> Scheme:
    _expect(weights, "num_bits", 4)
    _expect(weights, "type", "int")
    strategy: Any = weights.get("strategy")
    size: Any = weights.get("group_size")
    if strategy not in ("group", "channel"):
        raise SchemeRefused(f"compressed-tensors: strategy {strategy!r} of 4 bits: only group and channel are read")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise SchemeRefused(f"compressed-tensors: group_size {size!r} is no number of inputs")
    return Scheme(
        f"compressed-tensors, 4 bits, a scale a {strategy}",
        "packed",
        skipped=_entries(stated, "ignore"),
        group_size=size if strategy == "group" else 0,
        has_zeros=not weights.get("symmetric", True),
    )


def _four_bits(method: Literal["awq", "gptq"], stated: Mapping[str, Any]) -> Scheme:
    _expect(stated, "bits", 4, other="w_bit")
    size = stated.get("group_size", stated.get("q_group_size"))
    if type(size) is not int or size == 0 or size < -1:
        raise SchemeRefused(f"{method}: group_size {size!r} is no number of inputs")
    if method == "awq":
        _expect(stated, "version", "gemm", default="gemm")
        _expect(stated, "zero_point", True, default=True)
        skipped = _entries(stated, "modules_to_not_convert")
        return Scheme("awq, 4 bits", "awq", skipped, group_size=max(0, size))
    version = stated.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise SchemeRefused(f"gptq: checkpoint_format {version!r}: only gptq and gptq_v2 are read")
    return Scheme("gptq, 4 bits", "gptq", group_size=max(0, size), adds_one=version == "gptq")


def _expect(
    stated: Mapping[str, Any], field: str, wanted: Any, *, default: Any = None, other: str = "", more: str = ""
) -> None:
    value = stated.get(field, stated.get(other, default))
    if type(value) is not type(wanted) or (value.lower() if isinstance(value, str) else value) != wanted:
        raise SchemeRefused(
            f"{stated.get('quant_method', 'weights')}: {field} {value!r}: only {wanted!r}{more} is read"
        )


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise SchemeRefused(f"a block of {value!r} is not two numbers")
    return int(value[0]), int(value[1])


def _entries(stated: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    found = [entry for field in fields for entry in stated.get(field) or ()]
    if not all(isinstance(entry, str) for entry in found):
        raise SchemeRefused(f"{' or '.join(fields)}: is not a list of modules")
    return tuple(found)


def _names(entry: str, path: str) -> bool:
    """By a pattern (`re:`), or by consecutive names of the path, of which `*` is any."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], path) is not None
        except re.error as error:
            raise SchemeRefused(f"ignore: {entry!r} is no pattern ({error})") from None
    names = re.escape(entry).replace(r"\*", "[^.]+")
    return re.search(rf"(?:^|\.){names}(?:\.|$)", path) is not None


def _unpacked(words: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Codes of 4 bits, as int32, eight in the place of a word. order[i]: where in the word the i-th one stands."""
    codes = torch.stack([(words >> (4 * place)) & 15 for place in order], dim + 1)
    return codes.flatten(dim, dim + 1)
