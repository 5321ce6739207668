"""At load: transformers' own eager pass against our path, in chunks and beside another sequence.

It finds families of whose attention our path does not hear: windows that live in the mask alone, biases by distance,
positions that do not begin at 0, rows that change each other. Windows are made shorter than its prompt meanwhile, so it
costs two passes over a few tokens, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manylora_worker.kinds.api import Sampling, SequenceChunk, StepBatch
from manylora_worker.models.checkpoint import ModelRefused, said
from manylora_worker.models.layers.attention import ATTENTION
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import LoraPlanner
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.torch.model_runner import TorchModelRunner

_LENGTHS = (24, 15)
_BLOCK_SIZE = 8
_TABLES = ([4, 0, 2], [1, 3])
_WINDOW = 5
_FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # of a family's own code
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
# (sequence, tokens) of each step; the last of each sequence is a decode step
_STEPS = (((0, 9),), ((1, 14), (0, 8)), ((0, 6), (1, 1)), ((0, 1),))


def check_against_eager(loaded: LoadedModel, planner: LoraPlanner) -> None:
    """Raises ModelRefused."""
    spread = max(1, loaded.spec.vocab_size // 100)
    prompts = [[(7 + 3 * i + k * spread) % loaded.spec.vocab_size for k in range(n)] for i, n in enumerate(_LENGTHS)]
    with torch.inference_mode(), _short_windows(loaded):
        try:
            expected = _eager(loaded, prompts)
        except _FAILURES as error:
            raise ModelRefused(f"{loaded.spec.model_type}: its eager pass fails ({said(error)})") from error
        try:
            steps = _ours(loaded, planner, prompts)
        except _FAILURES as error:
            raise ModelRefused(f"{loaded.spec.model_type}: its pass in chunks fails ({said(error)})") from error
    tolerance = 1e-2 if loaded.dtype is torch.float32 else 0.2
    for sequence, last, logits in steps:
        wanted = expected[sequence][last]
        difference = float((logits - wanted).norm() / wanted.norm().clamp_min(1e-12))
        if not difference <= tolerance:  # not a number: neither
            raise ModelRefused(
                f"{loaded.spec.model_type}: it is not served as transformers computes it: after {last + 1} tokens, in "
                f"chunks, its logits are off by a share of {difference:.3g}"
            )


def _eager(loaded: LoadedModel, prompts: list[list[int]]) -> list[Tensor]:
    # [tokens, vocab] of each, float32
    loaded.model.set_attn_implementation("eager")
    try:
        return [
            loaded.model(input_ids=torch.tensor([prompt], device=loaded.device), use_cache=False).logits[0].float()
            for prompt in prompts
        ]
    finally:
        loaded.model.set_attn_implementation(ATTENTION)


def _ours(loaded: LoadedModel, planner: LoraPlanner, prompts: list[list[int]]) -> list[tuple[int, int, Tensor]]:
    """(sequence, position, its logits) at the end of every chunk."""
    num_blocks, num_states = sum(map(len, _TABLES)), loaded.spec.kv.state_blocks(_BLOCK_SIZE, loaded.dtype)
    cache = KvCache(
        loaded.spec.kv,
        num_blocks=num_blocks + len(_TABLES) * num_states,
        block_size=_BLOCK_SIZE,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    states = [range(num_blocks + i * num_states, num_blocks + (i + 1) * num_states) for i in range(len(_TABLES))]
    runner = TorchModelRunner(loaded, None, cache, planner)
    starts = [0] * len(prompts)
    found = []
    for step in _STEPS:
        chunks = []
        for sequence, count in step:
            start = starts[sequence]
            starts[sequence] = end = start + count
            chunks.append(
                SequenceChunk(
                    sequence_id=sequence,
                    token_ids=prompts[sequence][start:end],
                    start_position=start,
                    block_table=[*states[sequence], *_TABLES[sequence]],
                    adapter_uid=None,
                    samples=True,
                    sampling=Sampling(seed=0, temperature=0.0),
                    choice=0,
                    output_index=0,
                    prompt_token_ids=prompts[sequence],
                    output_token_ids=[],
                )
            )
        logits = runner.logits(StepBatch(chunks))
        found += [(sequence, starts[sequence] - 1, row) for (sequence, _), row in zip(step, logits, strict=True)]
    return found


@contextmanager
def _short_windows(loaded: LoadedModel) -> Iterator[None]:
    owners: list[Any] = [loaded.model.config.get_text_config(), *loaded.model.modules()]
    changed = []
    for owner in owners:
        for name in _WINDOW_FIELDS:
            window = getattr(owner, name, None)
            if type(window) is int and window > _WINDOW:
                changed.append((owner, name, window))
                setattr(owner, name, _WINDOW)
    try:
        yield
    finally:
        for owner, name, window in changed:
            setattr(owner, name, window)
