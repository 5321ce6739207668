"""From a StepBatch to tensors: where every token stands in the flat batch, and which rows are sampled.

Chunks stand ordered by adapter, so that an adapter's rows are consecutive, then by context length. Results are in the
StepBatch's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from manylora_shared.composition import parts_of
from manylora_shared.ids import AdapterKey, AdapterUid
from torch import Tensor

from manylora_worker.kinds.api import SequenceChunk, StepBatch, draws_of
from manylora_worker.models.layers.attention import AttentionStep, DecodeRow, PrefillRows
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import Segment
from manylora_worker.models.layers.prompt_scores import ScoredRows
from manylora_worker.models.layers.recurrence import StateRows, StepStates
from manylora_worker.weights.sites import DeviceAdapter

# A chunk that reads no more over all its tokens is attended token by token, among the sequences that decode: operations
# of its own in every layer would cost more.
_FEW_BLOCKS = 64


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    attention: AttentionStep
    segments: Sequence[Segment]
    num_rows: int
    sampled: Sequence[SequenceChunk]  # chunks that sample, in the StepBatch's order, one a draw (api.draws_of)
    logit_rows: Tensor  # [len(sampled)]: the row that each of them draws from
    scored: ScoredRows | None


def _place(chunk: SequenceChunk) -> tuple[str, bool, int]:
    return chunk.adapter_uid or "", len(chunk.token_ids) > 1, -chunk.start_position


def entered_blocks(chunks: Sequence[SequenceChunk], block_size: int, state_blocks: int = 0) -> list[int]:
    """Blocks that chunks begin and leave partly empty: their unwritten ends are stale."""
    blocks = []
    for chunk in chunks:
        end = chunk.start_position + len(chunk.token_ids)
        last_block = (end - 1) // block_size
        if last_block * block_size >= chunk.start_position and end % block_size:
            blocks.append(chunk.block_table[state_blocks + last_block])
    return blocks


def build_inputs(
    batch: StepBatch, cache: KvCache, adapters: Mapping[AdapterUid, DeviceAdapter], device: torch.device
) -> StepInputs:
    """Raises KeyError for an adapter that is not on the device."""
    block_size, state_blocks = cache.block_size, cache.state_blocks
    order = sorted(range(len(batch.chunks)), key=lambda i: _place(batch.chunks[i]))
    token_ids: list[int] = []
    positions: list[int] = []
    token_rows: list[int] = []
    decodes: list[DecodeRow] = []
    prefills: list[PrefillRows] = []
    states: list[StateRows] = []
    segments: list[Segment] = []
    segment_of: AdapterKey | None = None  # the last one's
    last_rows = [0] * len(batch.chunks)
    for i in order:
        chunk = batch.chunks[i]
        first_row = len(token_ids)
        count = len(chunk.token_ids)
        assert count > 0
        start, table = chunk.start_position, chunk.block_table
        if state_blocks:
            assert not chunk.num_guesses, "a state cannot be taken back"
            states.append(StateRows(first_row, first_row + count, start == 0, table[:state_blocks]))
            table = table[state_blocks:]
        token_ids += chunk.token_ids
        positions += range(start, start + count)
        token_rows += [cache.token_row(table[p // block_size], p % block_size) for p in range(start, start + count)]
        if count == 1 or count * -(-(start + count) // block_size) <= _FEW_BLOCKS:
            decodes += [DecodeRow(first_row + k, start + k + 1, table) for k in range(count)]
        else:
            prefills.append(PrefillRows(first_row, first_row + count, start, table))
        if chunk.adapter_uid is not None:
            if chunk.adapter_uid == segment_of:
                segments[-1] = replace(segments[-1], last_row=first_row + count)
            else:
                segment_of = chunk.adapter_uid
                (adapter, weight), *others = [(adapters[uid], weight) for uid, weight in parts_of(segment_of)]
                segments.append(Segment(first_row, first_row + count, adapter, weight, others))
        last_rows[i] = first_row + count - 1
    sampling = [i for i, chunk in enumerate(batch.chunks) if chunk.samples]
    rows = [last_rows[i] - before for i in sampling for before in range(batch.chunks[i].num_guesses, -1, -1)]
    num_rows = len(token_ids)
    return StepInputs(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        attention=AttentionStep(
            cache,
            token_rows=torch.tensor(token_rows, device=device),
            num_rows=num_rows,
            decodes=decodes,
            prefills=prefills,
            states=StepStates(cache, states, device) if state_blocks else None,
        ),
        segments=segments,
        num_rows=num_rows,
        sampled=[draw for i in sampling for draw in draws_of(batch.chunks[i])],
        logit_rows=torch.tensor(rows, dtype=torch.long, device=device),
        scored=ScoredRows.of(batch.chunks, last_rows.__getitem__),
    )


def one_chunk(cache: KvCache) -> AttentionStep:
    """Of as many tokens as a block has, in the first one; the others are its state's."""
    count, device, states = cache.block_size, cache.by_block.device, range(1, cache.num_blocks)
    return AttentionStep(
        cache,
        token_rows=torch.arange(count, device=device),
        num_rows=count,
        decodes=[],
        prefills=[PrefillRows(0, count, start_position=0, block_table=[0])],
        states=StepStates(cache, [StateRows(0, count, True, states)], device) if states else None,
    )
