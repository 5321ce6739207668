"""One request in the engine, and its choices. Only EngineCore, StepPlanner and Parking write them."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from manylora_shared.ids import TenantId

from manylora_worker.kinds.api import NO_POSITIONS, PENDING_TOKEN, Draft, EngineRequest, FinishReason
from manylora_worker.kinds.bars import RequestBars
from manylora_worker.kinds.constraint import Matcher
from manylora_worker.kinds.flow import CacheScope, FlowKey
from manylora_worker.kinds.guessing import Guessing
from manylora_worker.kinds.holding import Holding
from manylora_worker.kinds.speculation import MOST_TOKENS, Speculation


# WAITING_ADAPTER --> WAITING <--> PREFILL --> DECODE --> ENDING --> FINISHED
#                        ^----------(evicted)----'                   (from any state)
#                        PREFILL, DECODE <--> SWAPPED
#
# A sequence moves on when a step with it is started (`advance`), so the next can be planned beside it. What that step
# draws is *pending*: a token without a value. The KV of the first `num_computed_tokens` of prompt + output stands in
# its blocks, or a step in flight writes it. Between units it may be *parked*, with its blocks, in no step. An evicted
# one loses its blocks, keeps its output and prefills both again, uncharged up to `num_charged_tokens`; a swapped one
# gets its KV back in other blocks.
class SequenceStatus(enum.Enum):
    WAITING_ADAPTER = "waiting_adapter"  # not on the device yet
    WAITING = "waiting"  # for blocks; holds none
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"  # its KV is in host memory, or on its way there or back: `Sequence.swap` says which
    ENDING = "ending"  # its last token is drawn, and pending
    FINISHED = "finished"


_LEGAL: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    SequenceStatus.WAITING_ADAPTER: (SequenceStatus.WAITING, SequenceStatus.FINISHED),
    SequenceStatus.WAITING: (SequenceStatus.PREFILL, SequenceStatus.FINISHED),
    SequenceStatus.PREFILL: (
        SequenceStatus.DECODE,
        SequenceStatus.WAITING,
        SequenceStatus.SWAPPED,
        SequenceStatus.ENDING,
        SequenceStatus.FINISHED,
    ),
    SequenceStatus.DECODE: (
        SequenceStatus.WAITING,
        SequenceStatus.SWAPPED,
        SequenceStatus.ENDING,
        SequenceStatus.FINISHED,
    ),
    SequenceStatus.SWAPPED: (SequenceStatus.PREFILL, SequenceStatus.DECODE, SequenceStatus.FINISHED),
    SequenceStatus.ENDING: (SequenceStatus.FINISHED,),
    SequenceStatus.FINISHED: (),
}


class SwapStage(enum.Enum):
    LEAVING = "leaving"  # being copied to the host: it holds its blocks until that is over
    ON_HOST = "on_host"
    ARRIVING = "arriving"  # being copied into the blocks that it was given


@dataclass(slots=True)
class Swap:
    host_blocks: list[int]  # by logical block: where the KV of its computed tokens stands, or is going to
    resumes_as: SequenceStatus  # what it was, and will be when it is back
    stage: SwapStage = SwapStage.LEAVING


_SEQUENCES_BOUND = 1 << 64  # greater than any sequence id


def sequence_id_of(holding_id: int) -> int:
    return holding_id % _SEQUENCES_BOUND


class Sequence:
    __slots__ = (
        "awaits_mask",
        "block_keys",
        "block_table",
        "choice",
        "finish_reason",
        "flow",
        "group",
        "guessing",
        "has_worked",
        "is_undrawn",
        "item",
        "masks_follow",
        "matcher",
        "max_output_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_guesses",
        "num_holdings",
        "num_pending_tokens",
        "num_steps_in_flight",
        "order",
        "output_token_ids",
        "parked_at",
        "sequence_id",
        "speculation",
        "status",
        "swap",
        "tenant_id",
    )

    def __init__(self, sequence_id: int, group: SequenceGroup, choice: int, max_output_tokens: int) -> None:
        self.sequence_id = sequence_id
        self.group = group
        self.tenant_id: TenantId = group.request.tenant_id
        self.flow: FlowKey = (group.request.tenant_id, group.request.qos_class)
        self.choice = choice
        self.max_output_tokens = max_output_tokens  # as the request or the model's context bounds it
        self.order = (group.arrival, choice)  # by age, total: the smaller is the older
        self.status = SequenceStatus.WAITING_ADAPTER
        emitted = group.request.emitted_of(choice)
        self.output_token_ids: list[int] = list(emitted)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0  # drawn in steps whose result is not there yet
        self.num_steps_in_flight = 0  # until they are over, its blocks are theirs too
        # Of the first so many tokens the computing was charged, or the drawing.
        self.num_charged_tokens = len(group.request.prompt_token_ids) + len(emitted) if group.is_resumed else 0
        self.block_table: list[int] = []
        self.item: int | None = None  # its queued unit; None while it is in a slot or not with the planner
        self.parked_at = 0  # the step after which it was parked last
        self.has_worked = False  # it did work that was charged since it was given its blocks
        # of its first full blocks, as far as they were asked for (prefix_cache.PrefixKeys)
        self.block_keys: list[bytes] = []
        self.num_holdings = 0  # how often it has lost its blocks
        self.swap: Swap | None = None  # while SWAPPED, and of a finished one until the copy that was under way is over
        self.finish_reason: FinishReason | None = None
        compiled = group.request.constraint
        self.matcher: Matcher | None = None if compiled is None else compiled.matcher()
        self.awaits_mask = compiled is not None  # its last token is pending, or the next one's mask is
        self.masks_follow = False  # the runner takes them behind the layers
        self.is_undrawn = False  # in the step in flight it drew nothing: its mask came too late
        self.speculation: Speculation | None = None  # from its first decoding step on, where its group speculates
        self.num_guesses = 0  # in the step in flight: how many tokens that draws is not known
        self.guessing: Guessing | None = None  # from its first decoding step on, where its group has guesses
        self.num_drafted_tokens = 0  # the draft model's KV of them stands in the blocks

    @property
    def holding_id(self) -> int:
        """To a model runner: another one each time the sequence has lost its blocks (api.SequenceChunk)."""
        return self.num_holdings * _SEQUENCES_BOUND + self.sequence_id

    @property
    def num_tokens(self) -> int:
        # pending ones included
        return len(self.group.request.prompt_token_ids) + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        # pending ones included
        return len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_out(self) -> bool:
        # it has to be given the blocks of all its tokens before it can be computed
        return self.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)

    @property
    def is_copying(self) -> bool:
        """Its blocks are the copy's until that is over."""
        return self.swap is not None and self.swap.stage is not SwapStage.ON_HOST

    def num_new_tokens(self, num_tokens: int) -> int:
        """Of the next `num_tokens` that a prefill computes, those not charged yet."""
        computed = self.num_computed_tokens
        return max(0, computed + num_tokens - max(computed, self.num_charged_tokens))

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """[start, end) of prompt + output."""
        prompt = self.group.request.prompt_token_ids
        in_prompt = len(prompt)
        if end <= in_prompt:
            return prompt[start:end]
        if start >= in_prompt:
            return tuple(self.output_token_ids[start - in_prompt : end - in_prompt])
        return prompt[start:] + tuple(self.output_token_ids[: end - in_prompt])

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """PENDING_TOKEN where there is no value yet."""
        start = self.num_computed_tokens
        found = self.tokens(start, start + count)
        return found if len(found) == count else (*found, *(PENDING_TOKEN for _ in range(count - len(found))))

    def advance(self, num_tokens: int, *, samples: bool, draft: Draft | None = None) -> None:
        if draft is not None:
            self.num_drafted_tokens = draft.start_position + len(draft.token_ids) + max(0, draft.num_guesses - 1)
        self.num_computed_tokens += num_tokens
        self.num_steps_in_flight += 1
        self.num_pending_tokens += samples
        self.awaits_mask |= samples and self.matcher is not None

    @property
    def is_held_up(self) -> bool:
        """It cannot draw in the next step. A last token waits for its mask first: a step may come to draw nothing."""
        if not self.awaits_mask:
            return False
        follows = self.masks_follow and self.num_pending_tokens > 0 and self.status is SequenceStatus.DECODE
        return not follows or self.is_undrawn or self.num_output_tokens + 1 >= self.max_output_tokens

    def guess(self, most: int) -> SequenceOf[int] | None:
        """The next tokens, `most` at most. None: its last draw is worth waiting for, to guess from there."""
        most = min(most, self.max_output_tokens - self.num_output_tokens - 1)
        if not self.group.speculates or most < 1 or self.guessing is None:
            return ()
        if self.guessing.length(rate=1.0) < 1:  # it may not guess, however right it were: so it reads nothing
            return ()
        if self.speculation is None:
            end = self.num_tokens - self.num_pending_tokens
            self.speculation = Speculation(self.tokens(max(0, end - MOST_TOKENS), end))
        else:
            self.speculation.read_on()
        most = min(most, self.guessing.length(self.speculation.rate))
        if most < 1 or not self.speculation.is_worth_it:
            return ()
        return None if self.num_pending_tokens else self.speculation.guess(most)

    def judged(self, num_guesses: int, num_right: int) -> None:
        """Of a step whose tokens are taken."""
        self.num_drafted_tokens = min(self.num_drafted_tokens, self.num_computed_tokens)
        if self.guessing is not None:
            self.guessing.judged(num_guesses, num_right)

    def start_behind(self, num_cached_tokens: int) -> None:
        # the first admission of a request finds its own KV
        self.num_computed_tokens = num_cached_tokens
        if self.group.cached_prompt_tokens is None:
            self.group.cached_prompt_tokens = min(num_cached_tokens, len(self.group.request.prompt_token_ids))

    def move_to(self, status: SequenceStatus) -> None:
        assert status in _LEGAL[self.status], f"{self.status.name} -> {status.name} is not a legal transition"
        self.status = status


@dataclass
class GroupTimes:
    """When a request reached each phase, in the caller's `now`; None: not reached."""

    added_s: float
    adapter_ready_s: float | None = None
    first_step_s: float | None = None
    first_built_s: float | None = None  # its first step's batch
    first_rows: int = 0  # of that batch
    first_token_s: float | None = None


@dataclass(eq=False)
class SequenceGroup:
    # The *leader* (the first choice not finished) computes the prompt; when it is through, the others share its
    # blocks and start from the prompt's last token (`is_forked`). A recurrent model's state is not shared: each choice
    # computes for itself.

    request: EngineRequest
    cache_scope: CacheScope
    arrival: int
    times: GroupTimes
    shares_prompt: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    is_resumed: bool = field(init=False)  # behind tokens that an earlier attempt has drawn
    is_forked: bool = field(init=False)
    is_paused: bool = False  # its reader does not read: it takes no slot
    num_swaps: int = 0  # of its sequences to host memory
    num_evictions: int = 0  # its sequences lost their blocks and are computed again
    has_left_scope: bool = False  # its tenant's: it finds nothing there any more, and leaves nothing
    cached_prompt_tokens: int | None = None  # in the cache when it was first admitted; None: it never was
    num_prompt_tokens_computed: int = 0  # by any choice, or found in the cache: in steps that have begun
    bars: RequestBars | None = field(init=False)
    speculates: bool = False  # by prompt lookup
    drafts: bool = False  # by the draft model
    holding: Holding = field(init=False)

    def __post_init__(self) -> None:
        self.holding = Holding(is_shared=self.request.n > 1)
        self.bars = RequestBars.of(self.request)
        self.is_resumed = any(self.request.emitted)
        self.is_forked = bool(self.request.emitted) or not self.shares_prompt  # each choice stands elsewhere

    @property
    def is_scoring(self) -> bool:
        """Tokens of the prompt are left whose log-probabilities were asked for, and no step computes."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and self.num_prompt_tokens_computed < len(self.request.prompt_token_ids)

    def scored(self, start: int, end: int) -> range:
        """Of the positions of a chunk, those whose next token's log-probability is asked for, and was not told yet."""
        if not self.is_scoring:
            return NO_POSITIONS
        first = max(start, self.num_prompt_tokens_computed)
        return range(first, max(first, min(end, len(self.request.prompt_token_ids) - 1)))

    @property
    def num_unfinished(self) -> int:
        return sum(not s.is_finished for s in self.sequences)

    @property
    def num_drawn_tokens(self) -> int:
        # pending ones included
        return sum(s.num_output_tokens - len(self.request.emitted_of(s.choice)) for s in self.sequences)

    @property
    def leader(self) -> Sequence | None:
        return next((s for s in self.sequences if not s.is_finished), None)
