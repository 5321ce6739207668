"""What linear layers take on a device by a worker's `--quantization`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manylora.capacity.planning.parts import BadConfig, Parts, Product

_FLOAT, _BF16 = 4, 2  # bytes
_TILE = 64  # inputs of one scale in the kernels of 4 bits
_GROUP = 128  # of a known model, which ships nothing: what GPTQ and AWQ mostly have
_LEFT = ("lm_head", "embed", "visual", "vision")  # what may stay as it is: a step has it so anyway


@dataclass(frozen=True)
class Kept:
    """group: of inputs that have one scale; 0: all of them."""

    quantization: str = "none"
    group: int = 0
    has_shifts: bool = False

    def num_bytes(self, product: Product) -> int:
        # A checkpoint's own scales (and shifts) of 4 bits stay beside those of the kernels.
        own = self._scale_bytes(product) if self.quantization == "int4" else 0
        return self.read_bytes(product) + own * (2 if self.has_shifts else 1)

    def read_bytes(self, product: Product) -> int:
        """By a step."""
        size, bias = product.inputs * product.outputs, _BF16 * product.outputs if product.is_biased else 0
        scales = self._scale_bytes(product)
        if self.quantization == "none":
            return _BF16 * size + bias
        if self.quantization == "fp8":
            return size + scales + bias
        return size // 2 + _FLOAT * size // _TILE + (scales if self.has_shifts else 0) + bias

    def _scale_bytes(self, product: Product) -> int:
        return _FLOAT * product.outputs * (math.ceil(product.inputs / self.group) if self.group else 1)


def kept_of(config: Mapping[str, Any], parts: Parts, quantization: str) -> Kept:
    """Raises BadConfig for what a worker with a GPU refuses, or what is not planned for."""
    stated = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    method = None if not stated else stated.get("quant_method")
    if method == "bitsandbytes":
        raise BadConfig("quantization_config: bitsandbytes is served on the CPU alone")
    if quantization == "none":
        return Kept()
    if parts.num_experts:
        raise BadConfig(f"--quantization {quantization}: of a mixture of experts it is not planned for")
    kept = Kept(quantization, _GROUP if quantization == "int4" else 0) if not stated else _shipped(stated, quantization)
    if quantization in ("int4", "nf4"):
        step = math.lcm(_TILE, kept.group or _TILE)
        odd = next((each.inputs for each in parts.products if each.inputs % step), None)
        if kept.group % _TILE:
            raise BadConfig(f"--quantization {quantization}: a GPU takes no groups of {kept.group} inputs")
        if odd is not None:
            raise BadConfig(f"--quantization {quantization}: a layer's {odd} inputs are no groups of {step}")
    return kept


def _shipped(stated: Mapping[str, Any], quantization: str) -> Kept:
    method = stated.get("quant_method")
    groups: Mapping[str, Any] = stated.get("config_groups") or {}
    weights: Mapping[str, Any] = next(iter(groups.values())).get("weights") or {} if groups else {}
    block = stated.get("weight_block_size") or weights.get("block_structure")
    ignored = [stated.get(key) or () for key in ("ignore", "ignored_layers", "modules_to_not_convert")]
    strange = next((each for entries in ignored for each in entries if not any(part in each for part in _LEFT)), None)
    is_four = method in ("awq", "gptq") or (method == "compressed-tensors" and weights.get("num_bits") == 4)
    if quantization != ("int4" if is_four else "fp8") or method == "mxfp4":
        raise BadConfig(f"--quantization {quantization}: the weights are quantized already ({method})")
    if stated.get("desc_act") or weights.get("actorder") == "group":
        raise BadConfig(f"--quantization {quantization}: its groups are not of neighbouring inputs")
    if strange is not None:
        raise BadConfig(
            f"quantization_config: {strange!r} stays as it is, which is not planned for with {quantization}"
        )
    if not is_four:
        return Kept(quantization, block[1] if block else 0)
    size = stated.get("group_size", stated.get("q_group_size", weights.get("group_size")))
    is_symmetric = weights.get("symmetric", True) if weights else stated.get("sym", method == "gptq")
    return Kept(quantization, size if isinstance(size, int) and size > 0 else 0, not is_symmetric)
