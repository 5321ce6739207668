"""Codes of e4m3 that stand for numbers over a scale."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_NAN = 0xFF  # of bytes all of which are this one, numbers of 16 and 32 bits are none either


def codes_of(x: Tensor, scale: float) -> Tensor:
    # to the nearest, and at most the largest; a NaN stays one
    return (x * (1 / scale)).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8)


def numbers_of(codes: Tensor, scale: float, out: Tensor, scratch: Tensor) -> Tensor:
    """codes: as bytes, [n]; out: [n]; scratch: int16, [n]."""
    magnitudes = scratch.view(torch.uint8)[: len(codes)]
    if codes.device.type != "cpu" or int(torch.bitwise_and(codes, 0x7F, out=magnitudes).max()) == 0x7F:
        return out.copy_(codes.view(FP8)).mul_(scale)
    # There is no NaN. Shifted, a code's bits are those of a 16-bit float 2^-8 as large; torch's own conversion takes
    # twenty times as long.
    scratch.copy_(codes.view(torch.int8)).mul_(1 << 7).bitwise_and_(~(1 << 14))
    return out.copy_(scratch.view(torch.float16)).mul_(256 * scale)
