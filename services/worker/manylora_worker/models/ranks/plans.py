"""Steps as they are told to other ranks: once told, a sequence's blocks, sampling and prompt are not told again.

A PlanWriter and the PlanReaders that read all it writes, in order, forget the same sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from manylora_shared.ids import AdapterKey

from manylora_worker.kinds.api import Sampling, SequenceChunk, StepBatch

_KNOWN_SEQUENCES = 8192  # more than a step has


class _Sequence(NamedTuple):
    """What does not change while a sequence keeps its id."""

    adapter_uid: AdapterKey | None
    sampling: Sampling
    choice: int
    prompt_token_ids: Sequence[int]  # empty where no draw looks at it


class _Row(NamedTuple):
    sequence_id: int
    sequence: tuple[Any, ...] | None  # None: as told before
    token_ids: Sequence[int]
    start_position: int
    first_block: int  # `blocks` stand in the table from here on
    blocks: Sequence[int]
    samples: bool
    output_index: int
    output_token_ids: Sequence[int]
    bars: Sequence[tuple[int, int]]
    scored: tuple[int, int]
    mask: bytes | None
    mask_follows: bool
    num_guesses: int


Plan = tuple[Sequence[tuple[Any, ...]], Sequence[tuple[int, int]], Sequence[int]]


@dataclass
class _Known:
    sequence: _Sequence
    table: list[int]


class PlanWriter:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks: OrderedDict[int, int] = OrderedDict()  # told of each sequence's table

    def write(self, batch: StepBatch) -> Plan:
        """Plain data, without classes but Sampling."""
        return [self._row(chunk) for chunk in batch.chunks], batch.copy_blocks, batch.clear_blocks

    def _row(self, chunk: SequenceChunk) -> tuple[Any, ...]:
        known = self._num_blocks.pop(chunk.sequence_id, None)
        table, looks_back = chunk.block_table, chunk.sampling.adjusts_logits
        first = 0 if known is None else min(known, chunk.start_position // self._block_size)
        sequence = None
        if known is None:
            is_read = looks_back or chunk.sampling.prompt_logprobs is not None
            prompt = chunk.prompt_token_ids if is_read else ()
            sequence = (chunk.adapter_uid, chunk.sampling, chunk.choice, prompt)
        _keep(self._num_blocks, chunk.sequence_id, len(table))
        return (
            chunk.sequence_id, sequence, chunk.token_ids, chunk.start_position, first, list(table[first:]),
            chunk.samples, chunk.output_index, chunk.output_token_ids if looks_back else (), chunk.bars,
            (chunk.scored.start, chunk.scored.stop), chunk.mask, chunk.mask_follows,
            chunk.num_guesses,
        )  # fmt: skip


class PlanReader:
    def __init__(self) -> None:
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def read(self, plan: Plan) -> StepBatch:
        rows, copy_blocks, clear_blocks = plan
        return StepBatch([self._chunk(_Row(*row)) for row in rows], copy_blocks, clear_blocks)

    def _chunk(self, row: _Row) -> SequenceChunk:
        known = self._known.pop(row.sequence_id, None)
        if row.sequence is not None:
            known = _Known(_Sequence(*row.sequence), [])
        assert known is not None
        known.table[row.first_block :] = row.blocks
        _keep(self._known, row.sequence_id, known)
        adapter_uid, sampling, choice, prompt_token_ids = known.sequence
        return SequenceChunk(
            sequence_id=row.sequence_id,
            token_ids=row.token_ids,
            start_position=row.start_position,
            block_table=known.table,
            adapter_uid=adapter_uid,
            samples=row.samples,
            sampling=sampling,
            choice=choice,
            output_index=row.output_index,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=row.output_token_ids,
            bars=row.bars,
            scored=range(*row.scored),
            mask=row.mask,
            mask_follows=row.mask_follows,
            num_guesses=row.num_guesses,
        )


def _keep(known: OrderedDict[int, Any], sequence_id: int, value: Any) -> None:
    known[sequence_id] = value
    if len(known) > _KNOWN_SEQUENCES:
        known.popitem(last=False)
