"""The engine's two seams, in plain data: what its owner asks of it, and what it asks of the model.

    runtime (shell) --EngineRequest / abort--> EngineCore --StepBatch--> ModelRunner   (torch, kernels, or a fake)
                    <------TokenOutput-------             <--Sampled---
                                               EngineCore <--> AdapterBackend          (loads weights beside the loop)

EngineCore (core.py) is pure: it owns sequences, blocks and adapter residency, and decides each step. A ModelRunner owns
tensors and nothing else. All of it runs on one thread; only an AdapterBackend may use others.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from manylora_shared import sampling
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId


@dataclass(frozen=True, kw_only=True)
class Sampling(sampling.Sampling):
    """A request's sampling parameters, checked, with its seed."""

    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether there is a penalty or a bias."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        )


@dataclass(frozen=True)
class EngineRequest:
    request_id: RequestId
    tenant_id: TenantId
    qos_class: QosClass
    adapter_uid: AdapterUid | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Per choice, tokens in `emitted_token_ids` included."""
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    emitted_token_ids: tuple[int, ...] = ()
    """Output of an earlier attempt, forced before sampling goes on (n = 1 only)."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Tokens that do not come in a row in the output of a choice; none is empty."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ADAPTER_FAILED = "adapter_failed"
    ERROR = "error"


@dataclass(frozen=True)
class Logprobs:
    """At one output position: the sampled token's log-probability and the likeliest tokens with theirs, best first.
    Taken from the model's distribution before temperature, penalties and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# What there is of for each row of each step is not frozen: that would double the time that making one takes.


@dataclass(slots=True)
class TokenOutput:
    """New tokens of one choice, in order; `finish_reason` comes with its last (token_ids may then be empty)."""

    request_id: RequestId
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    message: str = ""
    stop_token_id: int | None = None
    """The token that ended the choice (STOP); it is not among token_ids."""


PENDING_TOKEN = -1
"""In SequenceChunk.token_ids: the token that this sequence drew in the step before, not known to the host yet."""

ANY_TOKEN = -2
"""In SequenceChunk.bars."""


@dataclass(slots=True)
class SequenceChunk:
    """The part of one sequence that a step computes.

    Positions [start_position, start_position + len(token_ids)) are computed; KV of everything before them stands in
    `block_table`, which covers the new positions too. While a sequence keeps its id, the blocks before the one where a
    chunk starts do not change; a sequence that has lost its blocks comes back under another id. Where `samples`, the
    next token is drawn from the last position's logits; its output index is `output_index` (0 = first token after the
    prompt).
    """

    sequence_id: int
    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]
    """Physical block ids by logical block, position p in block_table[p // block_size] at p % block_size."""
    adapter_uid: AdapterUid | None
    samples: bool
    sampling: Sampling
    choice: int
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Those that are known: without the one that is pending."""
    bars: Sequence[tuple[int, int]] = ()
    """(token, before): a token that is not drawn where `before` is the pending token, or ANY_TOKEN (bars.py)."""


@dataclass(frozen=True)
class StepBatch:
    chunks: Sequence[SequenceChunk]
    copy_blocks: Sequence[tuple[int, int]] = ()
    """(from, to): whole blocks to copy before the pass (copy-on-write)."""
    clear_blocks: Sequence[int] = ()
    """Blocks to clear before anything else: they come from another tenant, or are free and to be marked so."""


@dataclass(slots=True)
class Sampled:
    sequence_id: int
    token_id: int
    logprobs: Logprobs | None = None
    error: str | None = None
    """Set where no token could be drawn (the logits were not finite): token_id means nothing, this sequence ends with
    FinishReason.ERROR, and no other is affected."""


class ModelRunner(Protocol):
    """One forward pass at a time over the paged KV that it owns."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        """Runs one step; one Sampled for each chunk with `samples`, in the batch's order.

        Every adapter_uid in the batch is on the device. The result is a function of each chunk alone (up to rounding):
        never of its neighbours in the batch.
        """


class PendingStep(Protocol):
    """A step that was started."""

    def result(self) -> Sequence[Sampled]:
        """As ModelRunner.execute. Waits for it."""


@runtime_checkable
class AheadRunner(ModelRunner, Protocol):
    """A ModelRunner that takes the next step while one is being computed: the host plans beside the device.

    Steps happen in the order of their `submit`, each as if the one before it were over: what a step writes, a later one
    may read, clear or write again.
    """

    def submit(self, batch: StepBatch) -> PendingStep:
        """Starts a step. At most one other is unread then, and the batch may have its tokens as PENDING_TOKEN.

        Raises: what is wrong with this step alone; nothing of it was done.
        """


class PendingCopy(Protocol):
    """A copy of blocks that was started."""

    def is_over(self) -> bool:
        """Never blocks, but for a copy that was over when it was started. Raises where it failed."""

    def wait(self) -> None:
        """Returns when it is over."""

    @property
    def seconds(self) -> float:
        """How long it took, once it is over."""


class HostKv(Protocol):
    """Host memory of a runner's own, to which it copies whole blocks and back, beside its steps.

    A copy happens behind all steps that were submitted before it: one in flight may still write what is copied out (for
    another sequence, with which it is shared), or clear what is copied into (for one that was aborted). Steps that
    are submitted while it is under way neither write nor clear what is copied out, and do not touch what is copied
    into. A host block is read by nothing but `copy_in`, and is whole by then: `copy_out` overwrites all of it.
    """

    @property
    def num_blocks(self) -> int:
        """In host memory. 0: nothing can be copied."""

    @property
    def block_copy_s(self) -> float:
        """Seconds that it takes to copy one block out and back in, as measured or configured at the start."""

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> PendingCopy:
        """Starts copying."""

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> PendingCopy:
        """Starts copying."""


@runtime_checkable
class SwapRunner(ModelRunner, Protocol):
    """A ModelRunner whose blocks can be copied to host memory and back."""

    @property
    def host_kv(self) -> HostKv: ...


class AdapterTier(enum.IntEnum):
    HOST = 1
    DEVICE = 2


@dataclass(frozen=True)
class AdapterEvent:
    """A load ended: the adapter is on `tier` now, or `error` says why it is not. `size_bytes` comes with HOST and holds
    for both tiers (the greater, should they differ)."""

    uid: AdapterUid
    tier: AdapterTier
    size_bytes: int = 0
    error: str | None = None


class AdapterBackend(Protocol):
    """Moves adapter weights between tiers, beside the engine loop. One load per adapter and tier at a time."""

    def start_host_load(self, uid: AdapterUid) -> None:
        """Reads, verifies (digest, shapes) and keeps the adapter in host memory. Ends with an event for HOST."""

    def start_device_load(self, uid: AdapterUid) -> None:
        """Makes an adapter that is on the host usable by ModelRunner.execute. Ends with an event for DEVICE."""

    def poll(self) -> Sequence[AdapterEvent]:
        """Loads that ended since the last call. Never blocks."""

    def drop_device(self, uid: AdapterUid) -> None:
        """Frees it on the device at once. Its reference count is zero."""

    def drop_host(self, uid: AdapterUid) -> None: ...

    def close(self) -> None:
        """Ends the threads. Idempotent."""
