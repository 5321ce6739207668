"""A step that was started on the device: its tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manylora_worker.engine.api import Logprobs, Sampled, SequenceChunk
from manylora_worker.kernels.sampling import SampledRows


class PendingStep:
    """A step on its way; `result` waits for it."""

    def __init__(
        self, chunks: Sequence[SequenceChunk], results: Sequence[Sampled] = (), rows: SampledRows | None = None
    ) -> None:
        """results: of `chunks`, where they are known; else rows: device tensors, one row a chunk."""
        self._chunks = chunks
        self._results = results
        self._host: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        if rows is not None:
            wanted = (rows.token_ids, rows.sound, rows.logprobs, rows.top_values, rows.top_ids)
            self._host = [_to_host(tensor) for tensor in wanted if tensor is not None]
            if rows.token_ids.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()

    def result(self) -> Sequence[Sampled]:
        """One Sampled for each chunk that samples, in the batch's order."""
        if not self._host:
            return self._results
        if self._event is not None:
            self._event.synchronize()
        token_ids, sound, *logprobs = (tensor.tolist() for tensor in self._host)
        results = []
        for i, chunk in enumerate(self._chunks):
            if not sound[i]:
                error = "the model's logits for this token are not finite"
                results.append(Sampled(chunk.sequence_id, 0, error=error))
                continue
            found = None
            wanted = chunk.sampling.top_logprobs
            if wanted is not None:
                own, values, ids = (column[i] for column in logprobs)
                found = Logprobs(own, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
            results.append(Sampled(chunk.sequence_id, token_ids[i], found))
        return results


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on its way to the host."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
