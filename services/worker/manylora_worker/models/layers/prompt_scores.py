"""Log-probabilities of a prompt's own tokens. Logits of a slice of rows are reduced where they are, before the next
slice's: their memory is bounded, however long the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manylora_worker.kinds.api import NOT_FINITE, Logprobs, Sampled, SequenceChunk, joined


class ScoredRows(NamedTuple):
    chunks: Sequence[SequenceChunk]  # those with something in `scored`
    rows: Sequence[int]  # of the step, chunk by chunk
    targets: Sequence[int]  # the prompt's token behind each
    top: int  # the largest number of alternatives

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], last_rows: Callable[[int], int]) -> ScoredRows | None:
        """chunks: all of the step's; last_rows: by a chunk's index. None: nothing is scored."""
        scored = [i for i, chunk in enumerate(chunks) if chunk.scored]
        if not scored:
            return None
        rows: list[int] = []
        targets: list[int] = []
        for i in scored:
            chunk = chunks[i]
            first_row = last_rows(i) - len(chunk.token_ids) + 1 - chunk.start_position
            rows += range(first_row + chunk.scored.start, first_row + chunk.scored.stop)
            targets += chunk.prompt_token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
        found = [chunks[i] for i in scored]
        return cls(found, rows, targets, max(chunk.sampling.prompt_logprobs or 0 for chunk in found))


class Scores(NamedTuple):
    """[rows] each, `top_*`: [rows, top]."""

    own: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor


def score(head: Callable[[Tensor], Tensor], rows: Tensor, targets: Tensor, top: int, slice_rows: int) -> Scores:
    """Without a wait for the host. head: rows to their logits [rows, vocab], which the next call may overwrite."""
    slices = zip(rows.split(slice_rows), targets.split(slice_rows), strict=True)
    parts = [_reduced(head(some), wanted, top) for some, wanted in slices]
    return Scores(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _reduced(logits: Tensor, targets: Tensor, top: int) -> Scores:
    distribution = torch.log_softmax(logits.float(), dim=-1)
    own = distribution.gather(1, targets[:, None])
    values, ids = distribution.topk(min(top, logits.shape[1]), dim=-1)
    return Scores(own[:, 0], (distribution >= own).sum(dim=-1), values, ids)


def answers(
    chunks: Sequence[SequenceChunk], drawn: Sequence[Sampled], rows: ScoredRows | None, scores: Sequence[Tensor]
) -> list[Sampled]:
    """As ModelRunner.execute. drawn: all of the chunks that sample; scores: those of `rows`, on the host."""
    drawn = joined([chunk for chunk in chunks if chunk.samples], drawn)
    if rows is None:
        return drawn
    columns = zip(*(tensor.tolist() for tensor in scores), strict=True)
    told = {chunk.sequence_id: _told(chunk, columns) for chunk in rows.chunks}
    by_id = {sampled.sequence_id: sampled for sampled in drawn}
    found: list[Sampled] = []
    for chunk in chunks:
        if not chunk.is_answered:
            continue
        sampled = by_id.get(chunk.sequence_id) or Sampled(chunk.sequence_id, 0)
        if chunk.scored:
            sampled.scored = told[chunk.sequence_id]
            if any(each.logprob != each.logprob for each in sampled.scored):
                sampled.error = NOT_FINITE
        found.append(sampled)
    return found


def _told(chunk: SequenceChunk, columns: Iterator[tuple[Any, ...]]) -> list[Logprobs]:
    top = chunk.sampling.prompt_logprobs
    told = []
    for _ in chunk.scored:
        own, rank, values, ids = next(columns)
        told.append(Logprobs(own, tuple(zip(ids[:top], values[:top], strict=True)), rank))
    return told
