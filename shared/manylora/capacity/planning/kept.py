"""What linear layers and experts take on a device by a worker's `--quantization`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manylora.capacity.planning.parts import BadConfig, Cut, Parts, Product

_FLOAT, _BF16 = 4, 2  # bytes
_TILE = 64  # inputs of one scale in the kernels of 4 bits
_EXPERTS_TILE = 32  # inputs of one scale that the kernels of experts take
_GROUP = 128  # of a known model, which ships nothing: what GPTQ and AWQ mostly have
_FOUR_BITS = ("int4", "nf4")
_ROUTER = ".router.proj"  # Gemma 4's is a linear layer; others are no products


@dataclass(frozen=True)
class Kept:
    """group: of inputs that have one scale; 0: all of them. left: paths of layers and stacks that stay as they are.
    is_shipped: so, in place of being quantized on the device.
    """

    quantization: str = "none"
    group: int = 0
    has_shifts: bool = False
    left: frozenset[tuple[str, tuple[str, ...]]] = frozenset()
    is_shipped: bool = field(default=False, compare=False)

    def num_bytes(self, product: Product) -> int:
        # A checkpoint's own scales (and shifts) of 4 bits stay beside those of the kernels; experts have no others.
        is_twice = self.quantization == "int4" and not product.members and not self.leaves(product)
        own = self._scale_bytes(product) if is_twice else 0
        return self.read_bytes(product) + own * (2 if self.has_shifts else 1)

    def read_bytes(self, product: Product) -> int:
        """By a step; of experts, where it goes to all."""
        size, bias = product.elements, _BF16 * product.count * product.outputs if product.is_biased else 0
        if self.quantization == "none" or self.leaves(product):
            return _BF16 * size + bias
        scales = self._scale_bytes(product)
        if self.quantization == "fp8":
            return size + scales + bias
        shifts = scales if self.has_shifts else 0
        if product.members and self.quantization == "int4":
            return size // 2 + scales + shifts + bias
        return size // 2 + _FLOAT * size // _TILE + shifts + bias

    def load_bytes(self, product: Product) -> int:
        """While a worker starts: most of what it quantizes is so on its way to the device."""
        # But experts that it makes FP8 of, and gpt-oss's, which are to be turned first.
        is_before = product.members and not self.is_shipped and (self.quantization == "fp8" or product.is_biased)
        return Kept().num_bytes(product) if is_before else self.num_bytes(product)

    def leaves(self, product: Product) -> bool:
        return (product.path, product.members) in self.left

    def inputs_of_codes(self, product: Product) -> int:
        """Of which a GPU takes multiples."""
        if self.quantization not in _FOUR_BITS:
            return 1
        if product.members and self.quantization == "int4":
            return self.group or 2
        return math.lcm(_TILE, self.group or _TILE)

    def _scale_bytes(self, product: Product) -> int:
        groups = math.ceil(product.inputs / self.group) if self.group else 1
        return _FLOAT * product.count * product.outputs * groups


def kept_of(config: Mapping[str, Any], parts: Parts, quantization: str) -> Kept:
    """Raises BadConfig for what a worker with a GPU refuses, or what is not planned for."""
    told = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    stated = _object(told, "quantization_config")
    method = stated.get("quant_method")
    if method == "bitsandbytes":
        raise BadConfig("quantization_config: bitsandbytes is served on the CPU alone")
    if quantization == "none":
        return Kept()
    kept = _shipped(stated, quantization, parts) if stated else _made(quantization, parts)
    _check_groups(kept, parts)
    return kept


def _made(quantization: str, parts: Parts) -> Kept:
    if quantization == "int4":
        return Kept(quantization, _GROUP, is_shipped=True)
    routers = [each for each in parts.products if each.path.endswith(_ROUTER)]
    return Kept(quantization, left=frozenset((each.path, each.members) for each in routers))


def _check_groups(kept: Kept, parts: Parts) -> None:
    """As a GPU's kernels take them. Raises BadConfig."""
    option = f"--quantization {kept.quantization}"
    if kept.quantization in _FOUR_BITS and kept.group % _TILE:
        raise BadConfig(f"{option}: a GPU takes no groups of {kept.group} inputs")
    for each in (each for each in parts.products + parts.experts if not kept.leaves(each)):
        step = kept.inputs_of_codes(each)
        if each.inputs % step:
            raise BadConfig(f"{option}: a layer's {each.inputs} inputs are no groups of {step} ({each.path})")
        if each.members and kept.group % _EXPERTS_TILE and each.inputs > kept.group:
            raise BadConfig(f"{option}: experts on a GPU take no groups of {kept.group} inputs ({each.path})")


def check_ranks(kept: Kept, parts: Parts, ranks: int) -> None:
    """parts: of the whole. Raises BadConfig where inputs that have one scale would be torn."""
    cut = [each for each in parts.products + parts.experts if each.cut is Cut.INPUTS and not kept.leaves(each)]
    for each in cut:
        mine = each.inputs // ranks
        size = kept.inputs_of_codes(each)
        if kept.quantization != "none" and 0 < kept.group < each.inputs:
            size = math.lcm(size, kept.group)
        if mine % size:
            raise BadConfig(
                f"--tensor-parallel {ranks}: {each.path}: {mine} of its {each.inputs} inputs a rank are no whole "
                f"groups of {size}"
            )


def _shipped(stated: Mapping[str, Any], quantization: str, parts: Parts) -> Kept:
    method = stated.get("quant_method")
    groups = _object(stated.get("config_groups"), "quantization_config.config_groups")
    first = _object(next(iter(groups.values()), None), "quantization_config.config_groups: its first")
    weights = _object(first.get("weights"), "quantization_config.config_groups: its first's weights")
    block = _list(stated.get("weight_block_size") or weights.get("block_structure"), "weight_block_size")
    ignored = [_list(stated.get(key), key) for key in ("ignore", "ignored_layers", "modules_to_not_convert")]
    is_four = method in ("awq", "gptq") or (method == "compressed-tensors" and weights.get("num_bits") == 4)
    if quantization != ("int4" if is_four else "fp8") or method == "mxfp4":
        raise BadConfig(f"--quantization {quantization}: the weights are quantized already ({method})")
    if stated.get("desc_act") or weights.get("actorder") == "group":
        raise BadConfig(f"--quantization {quantization}: its groups are not of neighbouring inputs")
    names = [] if method == "gptq" else [name for each in ignored for name in each]  # gptq names none
    left = frozenset(_left(parts, _Named(names)))
    if not is_four:
        if block and not (len(block) == 2 and all(type(each) is int and each > 0 for each in block)):
            raise BadConfig(f"quantization_config.weight_block_size: must be two whole numbers above 0, not {block!r}")
        return Kept(quantization, block[1] if block else 0, left=left, is_shipped=True)
    size = stated.get("group_size", stated.get("q_group_size", weights.get("group_size")))
    is_symmetric = weights.get("symmetric", True) if weights else stated.get("sym", method == "gptq")
    group = size if isinstance(size, int) and size > 0 else 0
    return Kept(quantization, group, not is_symmetric, left, is_shipped=True)


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if value and not isinstance(value, Mapping):
        raise BadConfig(f"{path}: must be an object, not {value!r}")
    return value or {}


def _list(value: Any, name: str) -> Sequence[Any]:
    if value and not isinstance(value, list | tuple):
        raise BadConfig(f"quantization_config.{name}: must be a list, not {value!r}")
    return value or ()


def _left(parts: Parts, named: _Named) -> Iterator[tuple[str, tuple[str, ...]]]:
    # A worker rebuilds all that is one product or one stack, where a part of it is not quantized.
    sites = {each.site for each in parts.products if named.has(each.path)}
    yield from ((each.path, each.members) for each in parts.products if each.site in sites)
    for each in parts.experts:
        paths = (f"{each.path}.{expert}.{name}" for expert in range(each.count) for name in each.members)
        if any(map(named.has, paths)):
            yield each.path, each.members


class _Named:
    """Modules by what a checkpoint says of them: patterns (`re:`), or consecutive names, of which `*` is any."""

    def __init__(self, entries: Iterable[Any]) -> None:
        plain: set[tuple[str, ...]] = set()
        self._patterns: list[re.Pattern[str]] = []
        for entry in entries:
            if not isinstance(entry, str):
                raise BadConfig(f"quantization_config: {entry!r} names no module")
            if entry.startswith("re:"):
                self._patterns.append(_pattern(entry[3:]))
            elif "*" in entry:
                names = re.escape(entry).replace(r"\*", "[^.]+")
                self._patterns.append(re.compile(rf"(?:.*\.)?{names}(?:\.|$)"))
            else:
                plain.add(tuple(entry.split(".")))
        self._plain = plain
        self._longest = max(map(len, plain), default=0)

    def has(self, path: str) -> bool:
        return any(each.match(path) for each in self._patterns) or any(
            names in self._plain for names in _consecutive(path.split("."), self._longest)
        )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise BadConfig(f"quantization_config: {text!r} is no pattern ({error})") from None


def _consecutive(names: Sequence[str], longest: int) -> Iterator[tuple[str, ...]]:
    for first in range(len(names)):
        for last in range(first + 1, min(len(names), first + longest) + 1):
            yield tuple(names[first:last])
