"""A small model of the same tokens, without adapters, that guesses what the served one will draw. Its keys and values
stand behind those of the served model in each block, so that they are swapped, copied and cleared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manylora_worker.kinds.api import Draft, DraftModel, ModelRunner, Sampling, SequenceChunk, StepBatch

_GREEDY = Sampling(temperature=0.0)


class Drafter:
    def __init__(self, runner: ModelRunner, model: DraftModel, vocab_size: int) -> None:
        """runner: of the draft model, on its share of the blocks. vocab_size: of the served model."""
        self.model = model
        self._runner = runner
        self._vocab_size = vocab_size

    def guessed(self, batch: StepBatch) -> StepBatch:
        """With its guesses in the place of `draft`. The batch's blocks are prepared."""
        drafting = [(chunk, chunk.draft) for chunk in batch.chunks if chunk.draft is not None]
        if not drafting:
            return batch
        guesses: dict[int, list[int]] = {chunk.sequence_id: [] for chunk, _ in drafting}
        self._pass([self._chunk(chunk, d.start_position, d.token_ids, d) for chunk, d in drafting], guesses)
        for done in range(1, max(draft.num_guesses for _, draft in drafting)):
            self._pass(
                [
                    self._chunk(chunk, d.start_position + len(d.token_ids) + done - 1, own[-1:], d)
                    for chunk, d in drafting
                    if d.num_guesses > done
                    for own in [guesses[chunk.sequence_id]]
                ],
                guesses,
            )
        chunks = [
            chunk
            if chunk.draft is None
            else replace(chunk, token_ids=(*chunk.token_ids, *guesses[chunk.sequence_id]), draft=None)
            for chunk in batch.chunks
        ]
        return StepBatch(chunks)

    def _chunk(self, chunk: SequenceChunk, start: int, token_ids: Sequence[int], draft: Draft) -> SequenceChunk:
        own_size = self._runner.vocab_size
        return SequenceChunk(
            sequence_id=chunk.sequence_id,
            token_ids=[token if token < own_size else 0 for token in token_ids],  # rows of padding differ in number
            start_position=start,
            block_table=chunk.block_table,
            adapter_uid=None,
            samples=draft.num_guesses > 0,
            sampling=_GREEDY,
            choice=0,
            output_index=0,
            prompt_token_ids=(),
            output_token_ids=(),
        )

    def _pass(self, chunks: Sequence[SequenceChunk], guesses: dict[int, list[int]]) -> None:
        for sampled in self._runner.execute(StepBatch(chunks)):
            token_id = sampled.token_id if sampled.error is None else 0
            guesses[sampled.sequence_id].append(token_id if token_id < self._vocab_size else 0)
