"""The weights of a layer's experts, one behind the other in a tensor of codes: FP8, or 4 bits (int4, NF4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manylora_worker.models.cuda.kernels.nf4_format import BLOCK_SIZE, Nf4Weight, dequantize_reference, quantize
from manylora_worker.models.quantized.fp8 import Fp8Weight, codes_of, scales_of
from manylora_worker.models.quantized.int4 import Int4Weight
from manylora_worker.models.quantized.schemes import FP8
from manylora_worker.models.ranks.group import RankGroup

KERNELS_INPUTS = 32


class QuantizedStack(nn.Module):
    """[experts, out, in]. Immutable."""

    # Its parts are codes, scales and, of int4, shifts, as Fp8Weight, Int4Weight and Nf4Weight have them, experts ahead.
    # Of FP8 `inputs_of_scale` have one scale (0: all); what is rebuilt is of `dtype`.
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None

    def __init__(
        self, parts: Sequence[Tensor], inputs_of_scale: int, dtype: torch.dtype, *, is_nf4: bool = False
    ) -> None:
        super().__init__()
        self.is_nf4 = is_nf4
        codes, scales, *shifts = parts
        for name, part in (("codes", codes), ("scales", scales), ("shifts", shifts[0] if shifts else None)):
            is_there = part is not None and (name != "shifts" or bool(part.any()))
            self.register_buffer(name, part if is_there else None, persistent=False)
        experts, outputs, columns = codes.shape
        self.shape = torch.Size((experts, outputs, columns if self.is_fp8 else 2 * columns))
        self.group_size = inputs_of_scale if scales.shape[2] > 1 else self.shape[2]
        self.dtype = dtype

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype is FP8

    @property
    def has_kernel(self) -> bool:
        # cuda/kernels/experts_product.py takes blocks within a group, or of whole groups
        return self.group_size >= self.shape[2] or self.group_size % KERNELS_INPUTS == 0

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def parts(self) -> list[Tensor]:
        return [self.codes, self.scales, *([] if self.shifts is None else [self.shifts])]

    @property
    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """[out, in], rebuilt."""
        codes, scales = self.codes[expert], self.scales[expert]
        if self.is_fp8:
            return Fp8Weight(codes, scales, self.group_size).dequantized(self.dtype)
        if self.is_nf4:
            return dequantize_reference(Nf4Weight(codes, scales), self.dtype)
        shifts = None if self.shifts is None else self.shifts[expert]
        return Int4Weight(codes, scales, shifts, self.group_size).dequantized(self.dtype)


def quantized_stack(weight: Tensor, group: RankGroup | None = None) -> QuantizedStack:
    """[experts, out, in], to FP8 by output, as fp8.quantize."""
    # An expert at a time: 32-bit floats of all would take as much as a layer's weights, four times over.
    largest = torch.stack([each.float().abs().amax(1, keepdim=True) for each in weight])
    if group is not None:
        group.largest(largest)
    scales = scales_of(largest)
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    for expert, own in enumerate(weight):
        codes[expert] = codes_of(own, scales[expert])
    return QuantizedStack((codes, scales), 0, weight.dtype)


def nf4_stack(weight: Tensor, by: torch.device, on: torch.device) -> QuantizedStack:
    """[experts, out, in], to NF4 as nf4_format.quantize. by: the device that computes; on: the one that keeps it.
    Raises ValueError for inputs that are no whole blocks.
    """
    experts, outputs, inputs = weight.shape
    codes = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8, device=on)
    scales = torch.empty(experts, outputs, inputs // BLOCK_SIZE, device=on)
    for expert, own in enumerate(weight):  # each is a weight of its own, and the device has no more of them at once
        found = quantize(own.to(by))
        codes[expert], scales[expert] = found.codes, found.absmax
    return QuantizedStack((codes, scales), BLOCK_SIZE, weight.dtype, is_nf4=True)


def stacks_in(experts: nn.Module) -> dict[str, Tensor | QuantizedStack]:
    quantized = {name: each for name, each in experts.named_children() if isinstance(each, QuantizedStack)}
    return {**dict(experts.named_parameters()), **quantized}


def put_stack(experts: nn.Module, name: str, stack: QuantizedStack) -> None:
    delattr(experts, name)  # a parameter: torch lets no module take its place
    setattr(experts, name, stack)


@contextmanager
def rebuilt(experts: nn.Module) -> Iterator[None]:
    # parameters in the place of quantized stacks, as transformers' own forward takes them
    stacks = {name: each for name, each in stacks_in(experts).items() if isinstance(each, QuantizedStack)}
    for name, stack in stacks.items():
        weight = torch.stack([stack[expert] for expert in range(len(stack))])
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))
    try:
        yield
    finally:
        for name, stack in stacks.items():
            put_stack(experts, name, stack)
