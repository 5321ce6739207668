"""A step's rows, blocks and adapters in device tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manylora_worker.models.cuda.forward.delta_pass import StateStep


@dataclass(frozen=True)
class LoraStep:
    """Formats: kernels/lora.py."""

    tiles: Tensor
    num_tiles: int  # 0: by row
    row_adapters: Tensor
    columns: bool = False  # whether an adapter of the rows may have gains and shifts


@dataclass(frozen=True)
class DeviceStep:
    """Device tensors of at least `rows` entries. Rows [0, decode_rows) decode; the rest are chunks of prompts, cut in
    `prefill_tiles`.
    """

    rows: int
    num_rows: Tensor  # int32 scalar: rows that are there; those behind are padding
    token_ids: Tensor
    positions: Tensor  # int32
    tables: Tensor  # int32 [sequences, blocks], of tokens alone
    table_rows: Tensor  # int32: each row's sequence in `tables`
    decode_rows: int
    splits: int
    prefill_tiles: Tensor | None = None
    num_prefill_tiles: int = 0
    lora: LoraStep | None = None
    states: StateStep | None = None  # of a model with recurrent layers
    logit_rows: Tensor | None = None  # int64: rows whose logits are wanted; None: all, in order
