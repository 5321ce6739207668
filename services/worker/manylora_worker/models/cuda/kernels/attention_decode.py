"""Launches attention_decode.cu in place of attention.attend_decode, for bf16 on Hopper with NVRTC."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.attention import DecodeScratch, PagedLayout
from manylora_worker.models.cuda.kernels.cuda_module import CudaKernel, CudaUnavailable, with_instructions
from manylora_worker.models.decoder.weights import AttentionShape

_LOG = logging.getLogger(__name__)

MOST_GROUP = 8  # heads that share keys and values: the matrix unit's narrow side
_TILE = 16
_SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 1024  # of a processor's shared memory each program takes for itself (Hopper)


@dataclass(frozen=True)
class Variant:
    """How a program works; chosen by the number of rows x key-value heads."""

    fewest: int
    warps: int  # that share an item's tiles
    stages: int  # tiles that each warp has room for
    tiles_of_split: int = 32  # of TILE positions: a longer context is split, if it may be

    def shared_bytes(self, shape: AttentionShape, *, is_fp8: bool = False) -> int:
        group = shape.num_heads // shape.num_kv_heads
        stage = 2 * _TILE * shape.head_dim * (1 if is_fp8 else 2)
        merge = group * (shape.head_dim + 4) * 4 + group * 8
        return self.warps * (self.stages * stage + merge) + 4


VARIANTS = (Variant(384, 2, 3), Variant(0, 4, 3))  # the fastest of some on an H200; the first that there is enough for
FP8_VARIANTS = (Variant(384, 2, 5), Variant(0, 4, 5))  # as many bytes ahead as those


class DecodeAttention:
    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        device: torch.device,
        variants: Sequence[Variant] | None = None,
        *,
        is_fp8: bool = False,
    ) -> None:
        """Raises CudaUnavailable: no compiler, or not such a device or shape."""
        properties = torch.cuda.get_device_properties(device)
        if properties.major < 9:
            raise CudaUnavailable(f"{properties.name} is older than Hopper")
        self._shape, self._is_fp8 = shape, is_fp8
        self._processors = properties.multi_processor_count
        self._kernels = [
            (
                variant,
                CudaKernel(
                    source(shape, block_size, variant, is_fp8=is_fp8), "attend_decode", device,
                    shared_bytes=variant.shared_bytes(shape, is_fp8=is_fp8),
                ),
            )
            for variant in variants or (FP8_VARIANTS if is_fp8 else VARIANTS)
        ]  # fmt: skip

    @classmethod
    def where_it_runs(
        cls, shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False
    ) -> DecodeAttention | None:
        """dtype: of queries; is_fp8: codes of keys and values. None, and on a GPU a line in the log, where the Triton
        kernel has to do.
        """
        if device.type != "cuda" or dtype != torch.bfloat16:
            return None
        try:
            return cls(shape, block_size, device, is_fp8=is_fp8)
        except CudaUnavailable as error:
            _LOG.warning("decodes attend by a Triton kernel, which is slower: %s", error)
            return None

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        *,
        tables: Tensor,
        table_rows: Tensor,
        positions: Tensor,
        num_rows: Tensor,
        layout: PagedLayout,
        scratch: DecodeScratch,
        splits: int,
        pdl: bool,
        sinks: Tensor | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """As attention.attend_decode."""
        shape = self._shape
        rows = table_rows.shape[0]
        each_head = rows * shape.num_kv_heads
        variant, kernel = next(each for each in self._kernels if each[0].fewest <= each_head)
        shared_bytes = variant.shared_bytes(shape, is_fp8=self._is_fp8)
        programs = self._processors * (_SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))
        strides = (layout.stride_block, layout.stride_token, layout.stride_kv, layout.stride_head)
        read_sinks = scratch.stats if sinks is None else sinks  # it reads none of a shape without
        kernel.launch(
            (min(each_head * splits, programs), 1, 1), 32 * variant.warps, shared_bytes,
            (q, cache, out, tables, table_rows, positions, num_rows, scratch.partial, scratch.stats, scratch.counters,
             read_sinks, shape.scale * scales[0], scales[1], rows, splits, shape.num_kv_heads, tables.stride(0),
             *strides),
            pdl=pdl,
        )  # fmt: skip


def source(shape: AttentionShape, block_size: int, variant: Variant, *, is_fp8: bool = False) -> str:
    """Raises CudaUnavailable: the kernel does not serve such a shape."""
    group = shape.num_heads // shape.num_kv_heads
    has_room = variant.shared_bytes(shape, is_fp8=is_fp8) <= _SHARED_BYTES
    if shape.head_dim % (32 if is_fp8 else 16) or group > MOST_GROUP or block_size % _TILE or not has_room:
        raise CudaUnavailable(f"heads of {shape.head_dim}, {group} to a key-value head, blocks of {block_size} tokens")
    defined: dict[str, int | str] = {
        "FP8": int(is_fp8),
        "HEAD_DIM": shape.head_dim,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "WINDOW": shape.window or 0,
        "SOFTCAP": f"{shape.softcap or 0.0!r}f",
        "SINKS": int(shape.has_sinks),
        "WARPS": variant.warps,
        "STAGES": variant.stages,
        "TILES_OF_SPLIT": variant.tiles_of_split,
    }
    return with_instructions(Path(__file__).with_name("attention_decode.cu"), defined)
