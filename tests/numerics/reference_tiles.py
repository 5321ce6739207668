"""What the kernels of lora_tiles.cu compute, in plain torch: the tests' oracle, and a stand-in without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from manylora_worker.models.cuda.kernels.gate import Activation
from manylora_worker.models.cuda.kernels.lora import LoraRows, a_field, b_field, num_chunks, part_field
from manylora_worker.models.cuda.kernels.lora_tiles import LoraTiles


class ReferenceTiles(LoraTiles):
    """For tensors of any type, on any device."""

    def __init__(self) -> None:
        pass

    def shrink(self, x: torch.Tensor, lora: LoraRows, *, num_slots: int, pdl: bool) -> None:
        for rows, site in self._tiles(lora):
            for slot in range(num_slots):
                for chunk, (a, weight) in enumerate(self._chunks(lora, site, slot, a_field, x.shape[1])):
                    at = (slot * lora.chunks + chunk) * 16
                    lora.low_rank[:, rows, at : at + min(16, int(site[slot]) - 16 * chunk)] = 0
                    lora.low_rank[0, rows, at : at + a.shape[0]] = (x[rows] @ a.T).float() * weight

    def expand(self, lora: LoraRows, out: torch.Tensor, *, widths: Sequence[int], pdl: bool) -> None:
        s = lora.low_rank.sum(0).to(out.dtype)
        for rows, site in self._tiles(lora):
            end = 0
            for slot, width in enumerate(widths):
                out[rows, end : end + width] = 0
                for chunk, (b, _) in enumerate(self._chunks(lora, site, slot, b_field, width)):
                    at = (slot * lora.chunks + chunk) * 16
                    out[rows, end : end + width] += s[rows, at : at + b.shape[0]] @ b
                end += width

    def gate(
        self,
        gate_up: torch.Tensor,
        out: torch.Tensor,
        *,
        activation: Activation,
        lora: LoraRows,
        num_slots: int,
        pdl: bool,
    ) -> None:
        both = torch.full_like(gate_up[0], float("nan"))
        self.expand(lora, both, widths=[both.shape[1] // num_slots] * num_slots, pdl=pdl)
        result = activated(gate_up[0] + both, activation).to(out.dtype)
        for rows, _ in self._tiles(lora):
            out[rows] = result[rows]

    @staticmethod
    def _tiles(lora: LoraRows) -> Iterator[tuple[slice, torch.Tensor]]:
        for first, count, adapter, _ in lora.tiles[: int(lora.tiles[0, 3])].tolist():
            yield slice(first, first + count), lora.sites[adapter]

    @staticmethod
    def _chunks(
        lora: LoraRows, site: torch.Tensor, slot: int, field: Any, columns: int
    ) -> Iterator[tuple[torch.Tensor, float]]:
        rank = int(site[slot])
        for chunk in range(num_chunks(rank)):
            start, word = int(site[field(slot, chunk, lora.chunks)]), int(site[part_field(slot, chunk, lora.chunks)])
            ranks, weight = struct.unpack("<if", struct.pack("<q", word))
            yield lora.weights[start : start + ranks * columns].view(ranks, columns), weight


def activated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    functional = torch.nn.functional
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
