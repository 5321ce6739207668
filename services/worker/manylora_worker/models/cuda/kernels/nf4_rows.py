"""Launches nf4_product.cu in place of nf4.py's Triton kernels: few rows, on Hopper with NVRTC. See decision 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.cuda_module import CudaKernel, CudaUnavailable, with_instructions

MOST_ROWS = 16  # above, nf4_tiles.cu is ahead
IN_FEATURES_MULTIPLE = 256  # a row's scales are copied in units of 16 bytes: four blocks of 64

OUT_FEATURES_MULTIPLE = 16
_TILE = OUT_FEATURES_MULTIPLE
_WARPS = 16
_SHARED_BYTES = 227 * 1024  # of one block of threads, on Hopper
_TABLE_BYTES = 256 * 256


@dataclass(frozen=True)
class Variant:
    columns: int  # rows of x that a program takes at once
    warp_blocks: int
    stages: int
    round_tiles: int

    @property
    def part_blocks(self) -> int:
        return _WARPS * self.warp_blocks

    @property
    def shared_bytes(self) -> int:
        stage = _TILE * (self.warp_blocks * 32 + 32 + self.warp_blocks * 4)
        sums = 2 * self.round_tiles * _WARPS * -(-self.columns // 2) * 128
        return _TABLE_BYTES + sums + _WARPS * self.stages * stage


VARIANTS = (Variant(1, 4, 2, 8), Variant(8, 4, 2, 2), Variant(16, 4, 2, 1))  # ascending by columns; on an H200


@dataclass(frozen=True)
class Launch:
    """parts: of the inputs; the last may be shorter. members: programs that share a part's tiles."""

    variant: Variant
    parts: int
    members: int


def plan(rows: int, out_features: int, num_blocks: int, processors: int) -> Launch:
    variant = next(variant for variant in VARIANTS if rows <= variant.columns)
    parts = -(-num_blocks // variant.part_blocks)
    return Launch(variant, parts, max(1, min(processors // parts, out_features // _TILE)))


class Nf4Rows:
    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        """values: the 16 values as bf16 bits. Raises CudaUnavailable."""
        properties = torch.cuda.get_device_properties(device)
        if properties.major < 9 or properties.shared_memory_per_block_optin < _SHARED_BYTES:
            raise CudaUnavailable(f"{properties.name} is not of Hopper's kind")
        self._processors = properties.multi_processor_count
        self._kernels = {
            variant: CudaKernel(source(variant, values), "nf4_product", device, shared_bytes=_SHARED_BYTES)
            for variant in VARIANTS
        }

    @staticmethod
    def takes(rows: int, in_features: int, out_features: int) -> bool:
        return (
            1 <= rows <= MOST_ROWS
            and in_features % IN_FEATURES_MULTIPLE == 0
            and out_features % OUT_FEATURES_MULTIPLE == 0
        )

    def product(self, x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, *, pdl: bool) -> Tensor:
        """x [rows, in] @ weight^T + bias for at most MOST_ROWS rows of bf16, as float32 [parts, rows, out]."""
        rows, in_features = x.shape
        out_features, num_blocks = absmax.shape
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert self.takes(rows, in_features, out_features)
        how = plan(rows, out_features, num_blocks, self._processors)
        out = torch.empty(how.parts, rows, out_features, dtype=torch.float32, device=x.device)
        self._kernels[how.variant].launch(
            (how.parts * how.members, 1, 1), 32 * _WARPS, how.variant.shared_bytes,
            (x, codes, absmax, bias, out, rows, out_features, num_blocks, how.parts), pdl=pdl,
        )  # fmt: skip
        return out


def source(variant: Variant, values: Sequence[int]) -> str:
    defined: dict[str, int | str] = {
        "COLUMNS": variant.columns,
        "WARP_BLOCKS": variant.warp_blocks,
        "STAGES": variant.stages,
        "ROUND": variant.round_tiles,
        "VALUES": ",".join(f"{value:#06x}" for value in values),
    }
    return with_instructions(Path(__file__).with_name("nf4_product.cu"), defined, "nf4_table.cuh")
