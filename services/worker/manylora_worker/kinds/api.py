"""The engine's two seams, in plain data. All runs on one thread; only an AdapterBackend may use others."""

# runtime (shell) --EngineRequest / abort--> EngineCore --StepBatch--> ModelRunner   (torch, kernels, or a fake)
#                 <------TokenOutput-------             <--Sampled---
#                                            EngineCore <--> AdapterBackend          (loads weights beside the loop)
#
# A ModelRunner owns tensors, paged KV among them, and nothing else.

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from manylora_shared import sampling
from manylora_shared.ids import AdapterKey, AdapterUid, QosClass, RequestId, TenantId

from manylora_worker.kinds.constraint import CompiledConstraint


@dataclass(frozen=True, kw_only=True)
class Sampling(sampling.Sampling):
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
        )


@dataclass(frozen=True)
class EngineRequest:
    request_id: RequestId
    tenant_id: TenantId
    qos_class: QosClass
    adapter_uid: AdapterKey | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int  # per choice, tokens in `emitted` included
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    # of an earlier attempt, one a choice, forced before sampling goes on; None: the choice has ended
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    # token sequences that do not come in a row in the output of a choice; none is empty
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    constraint: CompiledConstraint | None = None  # its end_token_ids are among stop_token_ids
    is_trial: bool = False  # of an adapter that nobody uses yet: alone in its steps, whose errors are nobody else's

    @property
    def num_open(self) -> int:
        """Choices that have not ended in an earlier attempt."""
        return self.n - sum(tokens is None for tokens in self.emitted)

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        return (self.emitted[choice] or ()) if self.emitted else ()


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ADAPTER_FAILED = "adapter_failed"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"  # its store, or this machine, cannot give it now
    ERROR = "error"


@dataclass(frozen=True)
class Logprobs:
    """Best first, before temperature, penalties and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # of a prompt's token: how many are as likely, itself included


# What there is of for each row of each step is not frozen: that would double the time that making one takes.


@dataclass(slots=True)
class TokenOutput:
    # `finish_reason` comes with the last token (token_ids may then be empty). `prompt_logprobs` come by themselves, of
    # the prompt's tokens from its second on, in order.

    request_id: RequestId
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    message: str = ""
    stop_token_id: int | None = None  # ended the choice (STOP); not among token_ids
    prompt_logprobs: Sequence[Logprobs] = ()


# in SequenceChunk.token_ids: the token that this sequence drew in the step before, not known to the host yet
PENDING_TOKEN = -1

ANY_TOKEN = -2  # in SequenceChunk.bars

NO_POSITIONS = range(0)

NOT_FINITE = "the model's logits for this token are not finite"


@dataclass(slots=True)
class Draft:
    """What the draft model computes of a chunk's sequence before the step: tokens that it has not seen, and guesses."""

    start_position: int
    token_ids: Sequence[int]
    num_guesses: int  # where there are any, the last of `token_ids` is the chunk's, and they are put behind it


@dataclass(frozen=True)
class DraftModel:
    share: float  # of the model's work for a token that the draft model does for one
    max_context_tokens: int


@dataclass(slots=True)
class SequenceChunk:
    """A step computes positions [start_position, start_position + len(token_ids))."""

    # `block_table` holds the KV of everything before a chunk and covers the new positions too. While a sequence keeps
    # its id, the blocks before a chunk's first do not change; one that has lost its blocks comes back under another id.
    # Where `samples`, the next token is drawn from the last position's logits; its output index is `output_index` (0 =
    # first after the prompt).
    sequence_id: int
    token_ids: Sequence[int]
    start_position: int
    # position p stands in block_table[p // block_size] at p % block_size, behind a RecurrentRunner's `state_blocks`
    block_table: Sequence[int]
    adapter_uid: AdapterKey | None
    samples: bool
    sampling: Sampling
    choice: int
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # those that are known: without the one that is pending
    # (token, before): a token that is not drawn where `before` is the pending token, or ANY_TOKEN (bars.py)
    bars: Sequence[tuple[int, int]] = ()
    scored: range = NO_POSITIONS  # of these positions' logits the log-probability of the prompt's next token is told
    # a bit for each token (constraint.Matcher.mask): those that may be drawn; None: all
    mask: bytes | None = None
    mask_follows: bool = False  # it is not known yet, and comes with AheadStep.draw
    # The last so many of `token_ids` are guesses of what is drawn before them: one more is drawn for each of them that
    # is right (speculation.py). Only where nothing is pending, and no draw looks at what was drawn before.
    num_guesses: int = 0
    draft: Draft | None = None  # the runner puts its guesses into `token_ids`, where `num_guesses` counts them already

    @property
    def is_answered(self) -> bool:
        return self.samples or len(self.scored) > 0


@dataclass(frozen=True)
class StepBatch:
    chunks: Sequence[SequenceChunk]
    copy_blocks: Sequence[tuple[int, int]] = ()  # (from, to): whole blocks to copy before the pass (copy-on-write)
    # before anything else: they come from another tenant, or are free and to be marked so
    clear_blocks: Sequence[int] = ()


@dataclass(slots=True)
class Sampled:
    sequence_id: int
    token_id: int
    logprobs: Logprobs | None = None
    # no token could be drawn (the logits were not finite): token_id means nothing, this sequence alone ends with ERROR
    error: str | None = None
    scored: Sequence[Logprobs] = ()  # of the chunk's `scored`. Where it does not sample, token_id means nothing
    further: Sequence[int] = ()  # drawn behind token_id: as many as guesses were right


def draws_of(chunk: SequenceChunk) -> Sequence[SequenceChunk]:
    """One for each token that is drawn of it, in order."""
    return [
        chunk,
        *(replace(chunk, output_index=chunk.output_index + i + 1) for i in range(chunk.num_guesses)),
    ]


def joined(chunks: Iterable[SequenceChunk], drawn: Iterable[Sampled]) -> list[Sampled]:
    """chunks: those that sample; drawn: of each all of `draws_of`."""
    draws = iter(drawn)
    found = []
    for chunk in chunks:
        first = last = next(draws)
        further: list[int] = []
        is_right = True
        for guess in chunk.token_ids[len(chunk.token_ids) - chunk.num_guesses :]:
            behind = next(draws)
            is_right = is_right and last.token_id == guess and last.error is None and behind.error is None
            if is_right:
                further.append(behind.token_id)
            last = behind
        if further:
            first.further = further
        found.append(first)
    return found


class RunnerLost(RuntimeError):
    """The runner cannot go on, whatever the step: the engine ends."""


class ModelRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int:
        """In tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    # Every adapter of a batch is on the device, and all parts of a composition.
    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        """One Sampled for each chunk that `is_answered`, in order: a function of each chunk alone (up to rounding)."""


class PendingStep(Protocol):
    def is_over(self) -> bool:
        """The runner is through with what it has of the step. Never blocks."""

    def result(self) -> Sequence[Sampled]:
        """Waits, and returns as ModelRunner.execute."""


class AheadStep(PendingStep, Protocol):
    def draw(self, masks: Mapping[int, bytes]) -> None:
        """Once, where masks follow, before `result` and the next step. masks: by sequence. Where one is missing, the
        token that is drawn means nothing.
        """


@runtime_checkable
class AheadRunner(ModelRunner, Protocol):
    """Takes the next step while one is being computed, in the order of `submit`."""

    def submit(self, batch: StepBatch) -> AheadStep:
        """At most one other is unread then. Raises what is wrong with this step alone; nothing of it was done."""


@runtime_checkable
class RecurrentRunner(ModelRunner, Protocol):
    """A sequence may keep a state beside keys and values, which every token changes."""

    # A chunk finds the state of all tokens before it, or begins at position 0, where none is read. What a step did to a
    # state is not taken back: no guesses, no prefix without its state.
    @property
    def state_blocks(self) -> int:
        """The first blocks of each table; 0: the model keeps no state."""


def state_blocks_of(runner: ModelRunner) -> int:
    return runner.state_blocks if isinstance(runner, RecurrentRunner) else 0


@runtime_checkable
class DraftingRunner(ModelRunner, Protocol):
    """A small model guesses tokens beside it. Its keys and values stand in the sequences' own blocks."""

    @property
    def draft_model(self) -> DraftModel | None:
        """None: chunks have no `draft`."""


def draft_model_of(runner: ModelRunner) -> DraftModel | None:
    return runner.draft_model if isinstance(runner, DraftingRunner) else None


@runtime_checkable
class LosableRunner(ModelRunner, Protocol):
    """May come to its end beside the steps, and then raises RunnerLost in them, too."""

    def check(self) -> None:
        """Raises RunnerLost."""


@runtime_checkable
class ArenaRunner(ModelRunner, Protocol):
    """KV and adapters lie in blocks of one arena, which may change sides between two steps."""

    @property
    def adapter_blocks(self) -> range:
        """Those of adapters at first; `num_blocks` of KV come before them."""

    @property
    def block_bytes(self) -> int: ...

    def give_to_adapters(self, blocks: Sequence[int]) -> None:
        """Nobody has them, and no step under way clears them."""

    def take_from_adapters(self, count: int) -> Sequence[int]:
        """Free ones, up to `count`."""


class PendingCopy(Protocol):
    def is_over(self) -> bool:
        """Never blocks, except for a copy that was over when it was started. Raises where it failed."""

    def wait(self) -> None: ...

    @property
    def seconds(self) -> float:
        """Of the copy, once it is over."""


class HostKv(Protocol):
    """Copies whole blocks to host memory and back, beside the steps."""

    # A copy happens behind all steps that were submitted before it. Later steps neither write nor clear what is copied
    # out, and do not touch what is copied into. Only `copy_in` reads a host block, and `copy_out` has overwritten all
    # of it by then.
    @property
    def num_blocks(self) -> int:
        """0: nothing can be copied."""

    @property
    def block_copy_s(self) -> float:
        """Out and back in."""

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> PendingCopy: ...

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> PendingCopy: ...


@runtime_checkable
class SwapRunner(ModelRunner, Protocol):
    @property
    def host_kv(self) -> HostKv: ...


class MergeRefused(ValueError):
    """Says by name why this adapter does not go into this model's weights."""


@runtime_checkable
class MergingRunner(ModelRunner, Protocol):
    """Adds an adapter to the base model's weights while no step is under way. Its rows then name no adapter."""

    @property
    def merge_problem(self) -> str:
        """Why this model's weights take none; empty: they do."""

    def merge_some(self, uid: AdapterUid) -> bool:
        """One more matrix; whether it was the last. The adapter is on the device. Raises MergeRefused, or what went
        wrong: what was written already is restored then.
        """

    def restore_some(self) -> bool:
        """One more matrix is bit for bit what it was before; whether all are."""


class AdapterTier(enum.IntEnum):
    DISK = 1  # this machine's, of a store that is far
    HOST = 2
    DEVICE = 3


@dataclass(frozen=True)
class AdapterEvent:
    # `error` says why the adapter is not on `tier`; `size_bytes` comes with HOST and is the greater of host's and
    # device's

    uid: AdapterUid
    tier: AdapterTier
    size_bytes: int = 0
    error: str | None = None
    is_passing: bool = False  # the error is none of the adapter's own


class AdapterBackend(Protocol):
    # One load per adapter and tier at a time, beside the engine loop.

    def start_host_load(self, uid: AdapterUid) -> None:
        """Verifies digest and shapes. Ends with an event for HOST."""

    def start_device_load(self, uid: AdapterUid) -> None:
        """From the host. Ends with an event for DEVICE."""

    def poll(self) -> Sequence[AdapterEvent]:
        """Never blocks."""

    def drop_device(self, uid: AdapterUid) -> None:
        """At once. Nobody uses it."""

    def drop_host(self, uid: AdapterUid) -> None: ...

    def close(self) -> None:
        """Idempotent."""


@runtime_checkable
class FarBackend(AdapterBackend, Protocol):
    """Its store may be far: what is not on this machine is fetched before it is loaded."""

    def is_near(self, uid: AdapterUid) -> bool:
        """On this machine."""

    def start_fetch(self, uid: AdapterUid) -> None:
        """Ends with an event for DISK."""
