"""Which sequence each row of the sampler has, and which sequences have their tokens counted there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from manylora_worker.kinds.api import ANY_TOKEN, SequenceChunk
from manylora_worker.models.cuda.kernels.sampling import DeviceBars, DeviceSampler, RowState
from manylora_worker.models.cuda.steps.step_tables import to_device


class SamplerRows:
    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._penalty_slots = _PenaltySlots(sampler)
        self._owners: dict[int, tuple[int, int]] = {}  # by row: the sequence, and the output index that it draws next

    def clear(self) -> None:
        self._owners.clear()

    def write(self, sampled: Sequence[SequenceChunk], rows: Sequence[int]) -> None:
        slots = self._penalty_slots.of(sampled)
        changed = {
            row: RowState(
                chunk.sampling,
                chunk.choice,
                chunk.output_index,
                slots.get(chunk.sequence_id, -1),
                is_masked=chunk.mask is not None,
            )
            for chunk, row in zip(sampled, rows, strict=True)
            if self._owners.get(row) != (chunk.sequence_id, chunk.output_index)
        }
        self._sampler.write_rows(changed)
        self._sampler.write_masks(
            {row: chunk.mask for chunk, row in zip(sampled, rows, strict=True) if chunk.mask is not None}
        )
        self._owners = {
            row: (chunk.sequence_id, chunk.output_index + 1) for chunk, row in zip(sampled, rows, strict=True)
        }


class _PenaltySlots:
    # The one drawn for longest ago goes. A sequence with a pending token drew in the step before: it has its
    # slot.

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        # by sequence: the slot, and the output index that it draws next
        self._slots: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def of(self, sampled: Sequence[SequenceChunk]) -> dict[int, int]:
        wanted = [chunk for chunk in sampled if chunk.sampling.adjusts_logits]
        found: dict[int, int] = {}
        for chunk in wanted:
            slot, next_index = self._slots.pop(chunk.sequence_id, (-1, -1))
            if slot >= 0:
                self._slots[chunk.sequence_id] = (slot, chunk.output_index + 1)
                if next_index == chunk.output_index:
                    found[chunk.sequence_id] = slot
        for chunk in wanted:
            if chunk.sequence_id in found:
                continue
            assert chunk.output_index == len(chunk.output_token_ids), "its tokens are not known"
            if chunk.sequence_id in self._slots:
                slot, _ = self._slots[chunk.sequence_id]
            elif len(self._slots) < self._sampler.penalty_slots:
                slot = len(self._slots)
            else:
                _, (slot, _) = self._slots.popitem(last=False)
            self._slots[chunk.sequence_id] = (slot, chunk.output_index + 1)
            self._sampler.write_penalty_slot(slot, chunk.sampling, chunk.prompt_token_ids, chunk.output_token_ids)
            found[chunk.sequence_id] = slot
        return found


def bars_on_device(bars: Sequence[Sequence[tuple[int, int]]], pending_tokens: Tensor) -> DeviceBars | None:
    """bars: of each row, as in api.SequenceChunk. pending_tokens: [rows], on the device."""
    entries = [(row, token_id, before) for row, own in enumerate(bars) for token_id, before in own]
    if not entries:
        return None
    rows, token_ids, before = to_device(entries, torch.long, pending_tokens.device).unbind(1)
    holds = (before == ANY_TOKEN) | (before == pending_tokens[rows])
    return DeviceBars(rows, token_ids, torch.where(holds, float("-inf"), 0.0))
