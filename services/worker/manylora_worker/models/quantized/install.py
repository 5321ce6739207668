"""Puts quantized weights into a model whose linear layers are LoRA linears already. The head stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.experts import router_linears
from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.quantized import int4
from manylora_worker.models.quantized.fp8 import Fp8Linear, joined, quantize
from manylora_worker.models.quantized.stacks import QuantizedStack, nf4_stack, put_stack, quantized_stack
from manylora_worker.models.ranks.group import RankGroup

if TYPE_CHECKING:
    from manylora_worker.models.cuda.kernels.int4_product import Int4Kernels

_FIRST_WITH_FP8 = (8, 9)
_KERNELS_GROUP = 64


@dataclass(frozen=True)
class ShippedCodes:
    """by_path: what a layer's weight is made of (Scheme.codes, Scheme.words). inputs_of_scale: of FP8; 0: all."""

    by_path: Mapping[str, tuple[Tensor, ...]] = field(repr=False)
    inputs_of_scale: int


def quantize_to_fp8(
    model: PreTrainedModel, shipped: ShippedCodes | None, device: torch.device, group: RankGroup | None = None
) -> None:
    """A rank's share has the scales that the whole would. What a checkpoint in FP8 has is taken as it is.

    Raises ModelRefused.
    """
    # So is a layer of which a part is not in FP8: codes that were rebuilt are not made anew.
    check_device(device, "--quantization fp8", "--quantization none or nf4")
    kept = router_linears(model) if shipped is None else frozenset()
    for path, module in model.named_modules():
        if not isinstance(module, LoraLinear) or path in kept:
            continue
        linear = module.base
        if type(linear) is not nn.Linear:
            raise ModelRefused(f"{path}: {type(linear).__name__}: fp8 needs a linear layer")
        paths = [slot.path for slot in module.site.slots]
        if shipped is not None and not all(each in shipped.by_path for each in paths):
            continue
        if shipped is not None:
            own = [(codes, scales) for codes, scales in map(shipped.by_path.__getitem__, paths)]
            weight = joined(own, shipped.inputs_of_scale, device)
        else:
            weight = quantize(linear.weight.data.to(device), None if module.reduce is None else group)
        module.base = Fp8Linear(weight, _bias_on(linear, device))


def _bias_on(linear: nn.Linear, device: torch.device) -> Tensor | None:
    # A layer's own weight stays where it is: what is kept of it in codes has come there already.
    return None if linear.bias is None else linear.bias.data.to(device)


def quantize_experts(model: PreTrainedModel, quantization: Quantization, group: RankGroup | None) -> None:
    """Raises ModelRefused."""
    # of an unquantized checkpoint, whose mixtures are ours already; in FP8 a rank's share has the scales of the whole
    for path, module in model.named_modules():
        for name in ("gate_up", "down") if isinstance(module, LoraExperts) else ():
            weight = getattr(module, name)
            if isinstance(weight, nn.Parameter) and quantization == "nf4":
                put_stack(module, name, to_nf4(f"{path}.{name}", weight.data, weight.device, weight.device))
            elif isinstance(weight, nn.Parameter):
                put_stack(module, name, quantized_stack(weight.data, group if name == "down" else None))


def to_nf4(path: str, stack: Tensor, by: torch.device, on: torch.device) -> QuantizedStack:
    """See nf4_stack. Raises ModelRefused."""
    try:
        return nf4_stack(stack, by, on)
    except ValueError as error:
        raise ModelRefused(f"{path}: nf4: {error} (start with --quantization none or fp8)") from None


def keep_int4(model: PreTrainedModel, shipped: ShippedCodes, device: torch.device) -> None:
    """A layer of which a part is not shipped in 4 bits stays as it is. Raises ModelRefused."""
    kernels: Int4Kernels | None = None
    if device.type == "cuda":
        from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable
        from manylora_worker.models.cuda.kernels.int4_product import Int4Kernels

        try:
            kernels = Int4Kernels(device)
        except CudaUnavailable as error:
            raise ModelRefused(f"--quantization int4: {error} (start without it: weights are rebuilt)") from None
    for path, module in model.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        paths = [slot.path for slot in module.site.slots]
        if not all(each in shipped.by_path for each in paths):
            continue
        if type(module.base) is not nn.Linear:
            raise ModelRefused(f"{path}: {type(module.base).__name__}: int4 needs a linear layer")
        found = [shipped.by_path[each] for each in paths]
        weight = int4.joined(found, device)
        if kernels is not None and weight.group_size % _KERNELS_GROUP:
            raise ModelRefused(
                f"{path}: groups of {weight.group_size} inputs: int4 takes multiples of {_KERNELS_GROUP} on a GPU "
                "(start without --quantization int4: weights are rebuilt)"
            )
        module.base = int4.Int4Linear(weight, _bias_on(module.base, device), kernels)


def check_device(device: torch.device, option: str, instead: str) -> None:
    """Raises ModelRefused for a GPU that cannot read FP8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        raise ModelRefused(
            f"{option}: {torch.cuda.get_device_name(device)} has no FP8: it takes compute capability "
            f"{'.'.join(map(str, _FIRST_WITH_FP8))} (start with {instead})"
        )


def quantize_to_nf4(model: PreTrainedModel, device: torch.device) -> None:
    # layer by layer; the head and routers stay as they are
    from manylora_worker.models.cuda.kernels.nf4 import Nf4Linear, Nf4Workspace
    from manylora_worker.models.cuda.kernels.nf4_format import BLOCK_SIZE

    workspace, kept = Nf4Workspace(device), router_linears(model)
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and path not in kept:
            linear = module.base
            if type(linear) is not nn.Linear or linear.in_features % BLOCK_SIZE:
                raise ModelRefused(f"{path}: nf4 needs a linear layer whose inputs are a multiple of {BLOCK_SIZE}")
            weight = linear.weight.data.to(device)
            module.base = Nf4Linear.from_weight(weight, _bias_on(linear, device), workspace)
