"""Launches nf4_tiles.cu: tens of rows, on Hopper with NVRTC. See decision 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.cuda_module import CudaKernel, with_instructions

IN_FEATURES_MULTIPLE = 256  # scales are copied in units of 16 bytes: four blocks of 64
_BLOCK = 128  # inputs that a program takes at once
_SHARED_BYTES = 227 * 1024  # of one block of threads, on Hopper
_TABLE_BYTES = 256 * 256
_MOST_PARTS = 16
# In times of a block of 128 inputs: what a program takes before its first and behind its last, and how many sums the
# reader of the parts takes in.
_START = 3
_READ_SUMS = 1 << 19


@dataclass(frozen=True)
class Variant:
    columns: int  # rows of x
    warpgroups: int
    stages: int  # of codes

    @property
    def tile(self) -> int:
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        return _TABLE_BYTES + 32 * (self.columns * 16 + 16) + self.stages * 128 * self.warpgroups * 36


# Ascending by columns. Sums of 128 rows leave four warpgroups too few registers. With three, an 8B's gates and ups
# would come in parts, which lora_tiles.cu does not read.
VARIANTS = (Variant(32, 4, 4), Variant(64, 4, 4), Variant(128, 2, 4))
MOST_ROWS = VARIANTS[-1].columns


@dataclass(frozen=True)
class Launch:
    variant: Variant
    tiles: int
    part_blocks: int
    parts: int


def plan(variant: Variant, rows: int, out_features: int, num_blocks: int, processors: int) -> Launch:
    """The parts with which the processors and who reads the parts are done first."""

    def blocks_of(parts: int) -> int:
        return -(-num_blocks // (2 * parts)) * 2

    def duration(parts: int) -> float:
        waves = -(-tiles * parts // processors)
        return waves * (blocks_of(parts) + _START) + parts * rows * out_features / _READ_SUMS

    tiles = -(-out_features // variant.tile)
    part_blocks = blocks_of(min(range(1, min(_MOST_PARTS, num_blocks // 2) + 1), key=duration))
    return Launch(variant, tiles, part_blocks, -(-num_blocks // part_blocks))


class Nf4Tiles:
    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        """values: the 16 values as bf16 bits. device: a Hopper GPU. Raises CudaUnavailable."""
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels = {
            variant: CudaKernel(source(variant, values), "nf4_tiles", device, shared_bytes=_SHARED_BYTES)
            for variant in VARIANTS
        }

    @staticmethod
    def takes(rows: int, in_features: int) -> bool:
        return 1 <= rows <= MOST_ROWS and in_features % IN_FEATURES_MULTIPLE == 0

    def product(
        self, x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, *, unrounded: bool, pdl: bool
    ) -> Tensor:
        """x [rows, in] @ weight^T + bias for at most MOST_ROWS rows of bf16, as float32 [parts, rows, out]; in bf16
        where there is one part, but `unrounded`.
        """
        rows, in_features = x.shape
        out_features = len(absmax)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert self.takes(rows, in_features)
        num_blocks = in_features // _BLOCK
        variant = next(variant for variant in VARIANTS if rows <= variant.columns)
        how = plan(variant, rows, out_features, num_blocks, self._processors)
        rounds = how.parts == 1 and not unrounded
        dtype = x.dtype if rounds else torch.float32
        out = torch.empty(how.parts, rows, out_features, dtype=dtype, device=x.device)
        to = (None, out) if rounds else (out, None)
        self._kernels[variant].launch(
            (how.tiles, how.parts, 1), 128 * variant.warpgroups, variant.shared_bytes,
            (x, codes, absmax, bias, *to, rows, out_features, num_blocks, how.part_blocks), pdl=pdl,
        )  # fmt: skip
        return out


def source(variant: Variant, values: Sequence[int]) -> str:
    defined: dict[str, int | str] = {
        "COLUMNS": variant.columns,
        "WARPGROUPS": variant.warpgroups,
        "STAGES": variant.stages,
        "VALUES": ",".join(f"{value:#06x}" for value in values),
    }
    return with_instructions(Path(__file__).with_name("nf4_tiles.cu"), defined, "nf4_table.cuh")
