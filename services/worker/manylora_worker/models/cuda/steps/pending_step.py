"""A step that was started on the device: its tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora_worker.kinds.api import NOT_FINITE, Logprobs, Sampled, SequenceChunk, draws_of
from manylora_worker.models.cuda.kernels.sampling import SampledRows
from manylora_worker.models.layers.prompt_scores import ScoredRows, Scores, answers


@dataclass(frozen=True)
class Draws:
    """rows: each draw's row in `drawn`, whose tensors are on the device; None: no chunk samples."""

    rows: Sequence[int] = ()
    drawn: SampledRows | None = None
    scored: tuple[ScoredRows, Scores] | None = None


class PendingStep:
    """See api.AheadStep."""

    def __init__(
        self,
        chunks: Sequence[SequenceChunk],
        draws: Draws | Callable[[Mapping[int, bytes]], Draws],
        device: torch.device,
    ) -> None:
        """draws: or how to draw, once the masks are there."""
        self._chunks = chunks
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._draw: Callable[[Mapping[int, bytes]], Draws] | None = None
        self._rows: Sequence[int] = ()
        self._scored: ScoredRows | None = None
        self._scores: list[Tensor] = []
        self._host: list[Tensor] = []
        if isinstance(draws, Draws):
            self._take(draws)
        else:
            self._draw = draws
            self._record()

    def draw(self, masks: Mapping[int, bytes]) -> None:
        assert self._draw is not None
        draw, self._draw = self._draw, None
        self._take(draw(masks))

    def is_over(self) -> bool:
        return self._event is None or bool(self._event.query())

    def result(self) -> Sequence[Sampled]:
        assert self._draw is None
        if self._event is not None:
            self._event.synchronize()
        return answers(self._chunks, self._drawn() if self._host else [], self._scored, self._scores)

    def _take(self, draws: Draws) -> None:
        drawn, self._rows = draws.drawn, draws.rows
        if draws.scored is not None:
            self._scored = draws.scored[0]
            self._scores = [_to_host(tensor) for tensor in draws.scored[1]]
        if drawn is not None:
            count = max(draws.rows) + 1
            wanted = (drawn.token_ids, drawn.sound, drawn.logprobs, drawn.top_values, drawn.top_ids)
            self._host = [_to_host(tensor[:count]) for tensor in wanted if tensor is not None]
        self._record()

    def _record(self) -> None:
        if self._event is not None:
            self._event.record()

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
