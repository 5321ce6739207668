"""Weights in 4 bits (NF4): the format, its quantization, and a reference in plain torch.

Source: Dettmers et al., "QLoRA", 2023, section 3; the maps as bitsandbytes 0.50 computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64  # weights that share a scale
# bitsandbytes keeps the scales in 8 bits again. We undo that at load: 0.33 GB more for an 8B model, and no dependent
# load in the kernels. The float32 scale is the very number that bitsandbytes computes.
NESTED_BLOCK_SIZE = 256  # scales that share a scale of their own, in bitsandbytes' storage

# fmt: off
CODEBOOK = (  # NF4's 16 values (exact in float32), ascending
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


def dynamic_map() -> Tensor:
    """[256] float32, ascending. Dettmers, "8-bit approximations for parallelism in deep learning", 2015, section 2."""
    values: list[float] = []
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = ((boundaries[:-1] + boundaries[1:]) / 2.0) * 10 ** (i - 6)
        values += means.tolist()
        values += (-means).tolist()
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32)


@dataclass(frozen=True)
class Nf4Weight:
    """in_features is a multiple of 64."""

    # [out_features, in_features / 2] uint8, contiguous; the element with even index in the high nibble
    codes: Tensor
    # [out_features, in_features / 64] float32, contiguous: the scale of a block of 64 inputs
    absmax: Tensor

    def __post_init__(self) -> None:
        rows, half = self.codes.shape
        assert self.codes.dtype == torch.uint8
        assert self.codes.is_contiguous()
        assert half * 2 % BLOCK_SIZE == 0
        assert self.absmax.shape == (rows, half * 2 // BLOCK_SIZE)
        assert self.absmax.dtype == torch.float32
        assert self.absmax.is_contiguous()

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes


def nested_absmax(
    codes: Tensor, scales: Tensor, code_map: Tensor, offset: Tensor, block_size: int = NESTED_BLOCK_SIZE
) -> Tensor:
    """[blocks] float32: map[code] * scale + offset, two roundings as in bitsandbytes."""
    values = code_map[codes.reshape(-1).long()]
    wide = scales.repeat_interleave(block_size)[: values.numel()]
    return values.mul_(wide).add_(offset)


def quantize(weight: Tensor, *, double: bool = True) -> Nf4Weight:
    """[out, in] of any float type, as bitsandbytes' Linear4bit; `double`: its `compress_statistics`. The inputs are a
    multiple of 64, or ValueError.
    """
    out_features, in_features = weight.shape
    _check_in_features(in_features)
    blocks = weight.detach().float().reshape(-1, BLOCK_SIZE)
    absmax = blocks.abs().amax(dim=-1)
    scaled = blocks.mul(1.0 / absmax.clamp(min=1e-38)[:, None]).clamp_(-1, 1)
    codebook = torch.tensor(CODEBOOK, device=weight.device)
    indices = torch.bucketize(scaled, (codebook[:-1] + codebook[1:]) / 2, out_int32=True).to(torch.uint8)
    codes = (indices[:, ::2] << 4) | indices[:, 1::2]
    if double:
        offset = absmax.mean()  # its last bit depends on the device's order of summation
        absmax = nested_absmax(*_quantize_scales(absmax - offset), offset)
    return Nf4Weight(
        codes.reshape(out_features, in_features // 2).contiguous(),
        absmax.reshape(out_features, in_features // BLOCK_SIZE).contiguous(),
    )


def _quantize_scales(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # (8-bit codes, float32 scale a block of 256, the map)
    code_map = dynamic_map().to(values.device)
    padding = -values.numel() % NESTED_BLOCK_SIZE
    blocks = F.pad(values, (0, padding)).reshape(-1, NESTED_BLOCK_SIZE)
    scales = blocks.abs().amax(dim=-1)
    scaled = blocks.mul(1.0 / scales.clamp(min=1e-38)[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled, (code_map[:-1] + code_map[1:]) / 2, out_int32=True)
    return codes.reshape(-1)[: values.numel()].to(torch.uint8), scales, code_map


def _check_in_features(in_features: int) -> None:
    if in_features % BLOCK_SIZE:
        raise ValueError(f"{in_features} inputs: a row must be whole blocks of {BLOCK_SIZE}")


def dequantize_reference(weight: Nf4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    codebook = torch.tensor(CODEBOOK, device=weight.codes.device)
    indices = torch.stack([weight.codes >> 4, weight.codes & 0xF], dim=-1)
    values = codebook[indices.reshape(-1, BLOCK_SIZE).long()] * weight.absmax.reshape(-1, 1)
    return values.to(dtype).reshape(weight.out_features, weight.in_features)
