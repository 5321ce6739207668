"""What kernels are told of a step: rows by kind and adapter, tiles of prompts and of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterKey, AdapterUid
from manylora_worker.kinds.api import Sampling, SequenceChunk

pytest.importorskip("triton", reason="the packer's formats are those of the kernels")

from manylora_worker.models.cuda.kernels.lora import TILE_FIELDS, TILE_ROWS
from manylora_worker.models.cuda.steps.graph_shapes import NO_LORA
from manylora_worker.models.cuda.steps.step_packing import StepPacker

pytestmark = pytest.mark.kernels
KEYS = {name: key_of([Part(AdapterUid(name))]) for name in ("a", "b")}


class Slots:
    """As AdapterArena, of two adapters."""

    def slot_of(self, key: AdapterKey) -> int:
        return {KEYS["a"]: 5, KEYS["b"]: 2}[key]

    def scales(self, slot: int) -> bool:
        return slot == 2


def chunk(sequence_id: int, tokens: Sequence[int], start: int, adapter: str | None = None) -> SequenceChunk:
    blocks = [10 * sequence_id + i for i in range(-(-(start + len(tokens)) // 4))]
    return SequenceChunk(
        sequence_id=sequence_id, token_ids=tokens, start_position=start, block_table=blocks,
        adapter_uid=None if adapter is None else KEYS[adapter], samples=True, sampling=Sampling(temperature=0.0),
        choice=0, output_index=0, prompt_token_ids=(), output_token_ids=(),
    )  # fmt: skip


def packer() -> StepPacker:
    return StepPacker(
        Slots(), torch.device("cpu"), max_rows=64, max_sequences=8, block_size=4, max_blocks=12, prefill_rows=16,
        num_kv_heads=2,
    )  # type: ignore[arg-type] # fmt: skip


def test_decoding_rows_come_first_and_each_kind_by_adapter() -> None:
    prompt = list(range(100, 120))
    chunks = [chunk(1, prompt, 4, "a"), chunk(2, [7], 9, "a"), chunk(3, [8], 3), chunk(4, [9], 0, "b")]
    packed = packer().pack(chunks)
    step = packed.step
    assert (packed.is_decode, step.rows, step.decode_rows, int(step.num_rows[0])) == (False, 23, 3, 23)
    assert packed.row_of == {3: 0, 4: 1, 2: 2, 1: 22}
    assert step.token_ids[:23].tolist() == [8, 9, 7, *prompt]
    assert step.positions[:23].tolist() == [3, 0, 9, *range(4, 24)]
    tables = step.tables[step.table_rows[:23].long()]
    assert tables[0, :1].tolist() == [30]
    assert tables[2, :3].tolist() == [20, 21, 22]
    assert tables[22, :6].tolist() == [10, 11, 12, 13, 14, 15]
    assert step.prefill_tiles is not None
    assert step.num_prefill_tiles == 2
    slot = int(step.table_rows[3])
    assert step.prefill_tiles[:2].tolist() == [[3, 16, 4, slot], [19, 4, 20, slot]]
    assert not step.prefill_tiles[2:, 1].any(), "a graph has room for more, which end at once"


def test_rows_of_an_adapter_in_turn_are_cut_into_tiles() -> None:
    """Also rows without an adapter, whose slot is 0; a decoding row and a prompt of one adapter share a tile."""
    chunks = [chunk(1, range(TILE_ROWS + 3), 0, "a"), chunk(2, [7], 9, "a"), chunk(3, [8], 3)]
    packed = packer().pack(chunks)
    lora = packed.step.lora
    assert lora is not None
    assert packed.lora_tiles == lora.num_tiles == 3
    found = lora.tiles.view(-1, TILE_FIELDS)
    assert found[:3, :3].tolist() == [[0, 1, 0], [1, TILE_ROWS, 5], [1 + TILE_ROWS, 4, 5]]
    assert int(found[0, 3]) == 3
    assert not found[3:, 1].any()
    assert lora.row_adapters[: packed.step.rows].tolist() == [0] + [5] * (TILE_ROWS + 4)
    assert not packed.columns


def test_a_step_that_decodes_alone_can_be_a_graph() -> None:
    made = packer()
    packed = made.pack([chunk(1, [7], 5, "b")])
    assert packed.is_decode
    assert packed.columns, "adapter b has gains"
    plain = made.pack([chunk(1, [7], 6)])
    assert (plain.lora_tiles, plain.step.lora, plain.step.prefill_tiles) == (NO_LORA, None, None)
    assert plain.step.token_ids.data_ptr() == packed.step.token_ids.data_ptr(), "where graphs read them"
    assert plain.step.table_rows[1:].eq(made.padding_row).all()
