"""A step that was started on the device: its tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manylora_worker.kinds.api import NOT_FINITE, Logprobs, Sampled, SequenceChunk, draws_of
from manylora_worker.models.cuda.kernels.sampling import SampledRows
from manylora_worker.models.layers.prompt_scores import ScoredRows, Scores, answers


class PendingStep:
    def __init__(
        self,
        chunks: Sequence[SequenceChunk],
        rows: Sequence[int],
        drawn: SampledRows | None,
        scored: tuple[ScoredRows, Scores] | None = None,
    ) -> None:
        """rows: each draw's row in `drawn`, whose tensors are on the device; None: no chunk samples."""
        self._chunks = chunks
        self._rows = rows
        self._scored = None if scored is None else scored[0]
        self._scores = [] if scored is None else [_to_host(tensor) for tensor in scored[1]]
        self._host: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        if drawn is not None:
            count = max(rows) + 1
            wanted = (drawn.token_ids, drawn.sound, drawn.logprobs, drawn.top_values, drawn.top_ids)
            self._host = [_to_host(tensor[:count]) for tensor in wanted if tensor is not None]
        if torch.cuda.is_available() and (drawn is None or drawn.token_ids.is_cuda):
            self._event = torch.cuda.Event()
            self._event.record()

    def is_over(self) -> bool:
        return self._event is None or bool(self._event.query())

    def result(self) -> Sequence[Sampled]:
        if self._event is not None:
            self._event.synchronize()
        return answers(self._chunks, self._drawn() if self._host else [], self._scored, self._scores)

    def _drawn(self) -> list[Sampled]:
        sampled = [draw for chunk in self._chunks if chunk.samples for draw in draws_of(chunk)]
        token_ids, sound, *logprobs = (tensor.tolist() for tensor in self._host)
        results = []
        for i, chunk in zip(self._rows, sampled, strict=True):
            if not sound[i]:
                results.append(Sampled(chunk.sequence_id, 0, error=NOT_FINITE))
                continue
            found = None
            wanted = chunk.sampling.top_logprobs
            if wanted is not None:
                own, values, ids = (column[i] for column in logprobs)
                found = Logprobs(own, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
            results.append(Sampled(chunk.sequence_id, token_ids[i], found))
        return results


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
