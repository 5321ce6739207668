"""Drives a TorchModelRunner without the engine core: sequences with scattered blocks, in any mix of chunks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterKey, AdapterUid
from manylora_worker.kinds.api import Sampling, SequenceChunk, StepBatch, state_blocks_of
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import LoraCosts, LoraPlanner
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.weights.source import AdapterLimits, read_adapter

from tests.numerics.adapters import Reference
from tests.numerics.conftest import Family
from tests.numerics.families import VOCAB_SIZE

GREEDY = Sampling(seed=0, temperature=0.0)
LIMITS = AdapterLimits(max_rank=64)
ALWAYS_STACK = 1e15
NEVER_STACK = 0.0


def make_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int = 96,
    block_size: int = 4,
    product_flops: float = 2e5,
    num_host_blocks: int = 0,
) -> TorchModelRunner:
    cache = KvCache(
        loaded.spec.kv, num_blocks=num_blocks, block_size=block_size, dtype=loaded.dtype, device=loaded.device
    )
    planner = LoraPlanner(LoraCosts(product_flops, copied_weight=0.0), max_stacked_weights=1 << 24)
    return TorchModelRunner(loaded, trusted_weights(loaded), cache, planner, num_host_blocks=num_host_blocks)


def put_adapter(runner: TorchModelRunner, loaded: LoadedModel, folder: Path) -> AdapterUid:
    """Reads the adapter straight onto the device."""
    adapter = read_adapter(folder, loaded.adapter_base(), LIMITS)
    runner.adapters[adapter.uid] = runner.placed(adapter)
    return adapter.uid


@dataclass
class Stream:
    """One sequence: its tokens so far, and how many of them are computed."""

    prompt: list[int]
    adapter_uid: AdapterKey | None = None
    sampling: Sampling = GREEDY
    choice: int = 0
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Gives blocks out in random order and runs steps; never reuses a block."""

    def __init__(self, runner: TorchModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)

    def chunk(self, stream: Stream, num_tokens: int | None = None) -> SequenceChunk:
        """The stream's next tokens, all that wait by default."""
        start = stream.num_computed
        waiting = stream.tokens[start:]
        tokens = waiting if num_tokens is None else waiting[:num_tokens]
        end = start + len(tokens)
        state_blocks = state_blocks_of(self.runner)
        while (len(stream.blocks) - state_blocks) * self.runner.block_size < end:
            stream.blocks.append(self._free.pop())
        stream.num_computed = end
        return SequenceChunk(
            sequence_id=id(stream),
            token_ids=tokens,
            start_position=start,
            block_table=list(stream.blocks),
            adapter_uid=stream.adapter_uid,
            samples=end == len(stream.tokens),
            sampling=stream.sampling,
            choice=stream.choice,
            output_index=len(stream.output),
            prompt_token_ids=stream.prompt,
            output_token_ids=list(stream.output),
        )

    def logits(self, streams: Sequence[Stream], num_tokens: int | None = None) -> torch.Tensor:
        return self.runner.logits(StepBatch([self.chunk(s, num_tokens) for s in streams]))

    def step(self, streams: Sequence[Stream], num_tokens: int | None = None) -> None:
        """One step over all `streams`; tokens that it samples are appended."""
        by_id = {id(stream): stream for stream in streams}
        for sampled in self.runner.execute(StepBatch([self.chunk(s, num_tokens) for s in streams])):
            assert sampled.error is None
            by_id[sampled.sequence_id].output.append(sampled.token_id)

    def run(self, streams: Sequence[Stream], max_tokens: int, *, prefill_tokens: int | None = None) -> None:
        """Until every stream has `max_tokens` of output."""
        while live := [s for s in streams if len(s.output) < max_tokens]:
            self.step(live, prefill_tokens)


def prompts(count: int, seed: int = 0, shortest: int = 2, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


COMPOSITIONS: Mapping[str, Mapping[str, float]] = {
    "three": {"all-linear": 1.0, "rank-1": -0.7, "all-linear-b": 0.25},
    "two": {"all-linear-b": 1.0, "all-linear": 1.0},
    "halved": {"all-linear": 0.5},
}


def composed_streams(family: Family, mixed: Sequence[tuple[Stream, str | None]]) -> list[tuple[Stream, str | None]]:
    """Two of each composition of adapters that `mixed` has."""
    keys = composed(family.reference, {name: AdapterUid(s.adapter_uid) for s, name in mixed if s.adapter_uid and name})
    return [(Stream(prompt, key), name) for name, key in keys.items() for prompt in prompts(2, seed=len(name) + 90)]


def composed(reference: Reference, uids: Mapping[str | None, AdapterUid | None]) -> dict[str, AdapterKey]:
    """COMPOSITIONS by name, which the reference knows then too."""
    found = {}
    for name, weights in COMPOSITIONS.items():
        reference.compose(name, weights)
        found[name] = key_of(Part(uids[part] or AdapterUid(""), weight) for part, weight in weights.items())
    return found


def mixed_streams(family: Family, driver: Driver, seed: int = 0) -> list[tuple[Stream, str | None]]:
    """A stream for every adapter, some twice, and two without."""
    names: list[str | None] = [*family.adapters, None, *list(family.adapters)[:2], None]
    random.Random(seed).shuffle(names)
    uids = {name: put_adapter(driver.runner, family.loaded, folder) for name, folder in family.adapters.items()}
    drawn = prompts(len(names), seed)
    return [
        (Stream(prompt, None if name is None else uids[name]), name) for prompt, name in zip(drawn, names, strict=True)
    ]
