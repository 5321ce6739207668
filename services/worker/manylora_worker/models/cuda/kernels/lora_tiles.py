"""Launches lora_tiles.cu in place of Triton's kernels by tile (lora.py, gate.py), for bf16 on Hopper with NVRTC. See
docs/decisions/0012.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.cuda_module import CudaKernel, CudaUnavailable, with_instructions
from manylora_worker.models.cuda.kernels.lora import CHUNK_RANKS, MAX_SLOTS, TILE_ROWS, LoraRows
from manylora_worker.models.decoder.weights import Activation

_LOG = logging.getLogger(__name__)

# of a step; 128 are the fewest measured to gain (64 lose), above 512 most tiles have 16 rows
FEWEST_ROWS, MOST_ROWS = 128, 512
SPLIT = 1024  # inputs of one of shrink's splits, as lora.shrink_splits counts them for so many rows
_SHRINK_WARPS = 8
_EXPAND_WARPS = 4
_LINE_BYTES = 128
_SPAN = 64


@dataclass(frozen=True)
class Sizes:
    # in the source's words; the fastest of some on an H200

    shrink_stages: int = 2
    expand_spans: int = 2
    expand_stages: int = 2
    gate_spans: int = 4
    gate_stages: int = 2
    programs: int = 8  # on each processor, at most; beyond them, programs take several items

    def shrink_bytes(self) -> int:
        return _SHRINK_WARPS * (self.shrink_stages * 32 * _LINE_BYTES + 4 * TILE_ROWS * CHUNK_RANKS)

    def expand_bytes(self, chunks: int) -> int:
        return _EXPAND_WARPS * self.expand_stages * 16 * _LINE_BYTES + _s_bytes(chunks)

    def gate_bytes(self, chunks: int) -> int:
        return _EXPAND_WARPS * self.gate_stages * 48 * _LINE_BYTES + 2 * _s_bytes(chunks)


def _s_bytes(chunks: int) -> int:
    return TILE_ROWS * (chunks * CHUNK_RANKS + 8) * 2


class LoraTiles:
    def __init__(self, chunks: int, device: torch.device, sizes: Sizes | None = None) -> None:
        """Raises CudaUnavailable: no compiler, or not such a device."""
        properties = torch.cuda.get_device_properties(device)
        if properties.major < 9:
            raise CudaUnavailable(f"{properties.name} is older than Hopper")
        self._sizes = sizes or Sizes()
        self._bytes = {
            "lora_shrink": self._sizes.shrink_bytes(),
            "lora_expand": self._sizes.expand_bytes(chunks),
            "lora_gate": self._sizes.gate_bytes(chunks),
        }
        text = source(chunks, self._sizes)
        self._kernels = {
            name: CudaKernel(text, name, device, shared_bytes=shared) for name, shared in self._bytes.items()
        }
        self._programs = self._sizes.programs * properties.multi_processor_count

    @classmethod
    def where_it_runs(cls, chunks: int, dtype: torch.dtype, device: torch.device) -> LoraTiles | None:
        """None, and on a GPU a line in the log, where the Triton kernels have to do."""
        if device.type != "cuda" or dtype != torch.bfloat16:
            return None
        try:
            return cls(chunks, device)
        except CudaUnavailable as error:
            _LOG.warning("rows that share adapters are computed by Triton kernels, which are slower: %s", error)
            return None

    def shrink(self, x: Tensor, lora: LoraRows, *, num_slots: int, pdl: bool) -> None:
        """As lora.shrink."""
        splits = lora.low_rank.shape[0]
        assert x.is_contiguous()
        assert x.shape[1] <= splits * SPLIT
        self._launch(
            "lora_shrink", (splits, num_slots), lora, _SHRINK_WARPS,
            (x, lora.weights, lora.sites, lora.tiles, lora.low_rank, x.shape[1], *_strides(lora)), pdl=pdl,
        )  # fmt: skip

    def expand(self, lora: LoraRows, out: Tensor, *, widths: Sequence[int], pdl: bool) -> None:
        """out[row] = s[row] B of all the rows that tiles have, zero where a row has no adapter.

        Args:
            out: [rows, sum of widths], contiguous, written.
        """
        assert out.is_contiguous()
        assert out.shape[1] == sum(widths)
        block = _EXPAND_WARPS * self._sizes.expand_spans * _SPAN
        columns = [*widths, *[0] * (MAX_SLOTS - len(widths))]
        self._launch(
            "lora_expand", (sum(-(-width // block) for width in widths),), lora, _EXPAND_WARPS,
            (lora.low_rank, lora.weights, lora.sites, lora.tiles, out, *columns, lora.low_rank.shape[0],
             *_strides(lora)),
            pdl=pdl,
        )  # fmt: skip

    def gate(
        self,
        gate_up: Tensor,
        out: Tensor,
        *,
        activation: Activation,
        lora: LoraRows,
        num_slots: int,
        pdl: bool,
    ) -> None:
        """As gate.gate, of a product in one part of bf16."""
        width = out.shape[1]
        assert gate_up.is_contiguous()
        assert gate_up.dtype == torch.bfloat16
        block = _EXPAND_WARPS * self._sizes.gate_spans * _SPAN
        slots = (1, 0, width) if num_slots == 2 else (0, width, 2 * width)
        self._launch(
            "lora_gate", (-(-width // block),), lora, _EXPAND_WARPS,
            (gate_up, out, lora.low_rank, lora.weights, lora.sites, lora.tiles, width, *slots,
             int(activation == "gelu_tanh"), lora.low_rank.shape[0], *_strides(lora)),
            pdl=pdl,
        )  # fmt: skip

    def _launch(
        self,
        name: str,
        apart: tuple[int, ...],
        lora: LoraRows,
        warps: int,
        arguments: Sequence[Tensor | int],
        *,
        pdl: bool,
    ) -> None:
        # `apart`: the grid without its last dimension, which the tiles share
        members = max(1, min(lora.num_tiles, self._programs // math.prod(apart)))
        grid = (*apart, members, 1)[:3]
        assert len(grid) == 3
        self._kernels[name].launch(grid, 32 * warps, self._bytes[name], arguments, pdl=pdl)


def _strides(lora: LoraRows) -> tuple[int, int, int]:
    return lora.sites.stride(0), lora.low_rank.stride(1), lora.low_rank.stride(0)


def source(chunks: int, sizes: Sizes) -> str:
    defined = {
        "CHUNKS": chunks,
        "SHRINK_STAGES": sizes.shrink_stages,
        "EXPAND_SPANS": sizes.expand_spans,
        "EXPAND_STAGES": sizes.expand_stages,
        "GATE_SPANS": sizes.gate_spans,
        "GATE_STAGES": sizes.gate_stages,
    }
    return with_instructions(Path(__file__).with_name("lora_tiles.cu"), defined)
