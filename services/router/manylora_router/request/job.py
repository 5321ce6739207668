"""An admitted request, as admission and its grant leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from manylora.v1 import scheduler_pb2
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.ids import DEFAULT_POOL, QosClass, TenantId
from manylora_shared.sampling import Sampling
from manylora_shared.telemetry import request_attributes
from manylora_shared.telemetry.names import AttributeValue
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.wire import QOS_NUMBERS

from manylora_router.guard.admission import Adapter
from manylora_router.links.wire import Grant
from manylora_router.request.frames import Degraded
from manylora_router.text.stop_strings import StopStrings


@dataclass(frozen=True)
class Job:
    request_id: str
    tenant_id: TenantId
    qos_class: QosClass
    priority: int
    adapter: Adapter | None
    prompt_token_ids: Sequence[int]
    max_tokens: int
    n: int
    sampling: Sampling  # with its seed
    stop: StopStrings | None
    stop_tokens: Mapping[int, str]  # stop strings that are a token, by its id
    stop_token_ids: Sequence[int]  # with those
    bad_sequences: Sequence[Sequence[int]]  # the bad words in tokens; `sampling` has them no more
    received_at: float  # by the event loop's clock, as is the deadline
    deadline: float | None
    traceparent: str
    pool: str = DEFAULT_POOL  # whose workers run it
    can_stream: bool = True  # False: all frames come at the end
    constraint: Constraint | None = None
    degraded: Degraded | None = None  # by overload; `max_tokens` is as it is in force
    is_resumed: bool = False
    key_id: str = ""  # of the API key that it came with; empty: it came with none
    emitted: Sequence[Sequence[int] | None] = ()  # of a resumed one, by choice; None: the choice has ended
    is_resumable: bool = False  # its caller can go on with it at another router
    delivered: Sequence[tuple[Sequence[int], int]] | None = None  # it does so here, and has this of each choice
    charged_tokens: int = 0  # of that answer, as far as is known
    limits: KeyLimits | None = None  # of the key that it came with
    is_hedge: bool = False  # of two that its caller asks at once: cancelled before its first frame it costs nothing

    @property
    def most_tokens(self) -> int:
        """If each choice takes all that it may."""
        return len(self.prompt_token_ids) + self.max_tokens * self.n

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt whose log-probabilities a worker tells."""
        is_asked = self.sampling.prompt_logprobs is not None
        return len(self.prompt_token_ids) - 1 if is_asked else 0

    def as_granted(self, grant: Grant) -> Job:
        """With less output, where overload makes it so."""
        cap = grant.max_output_tokens
        if cap is None or self.is_resumed or cap >= self.max_tokens:
            return self
        asked = self.degraded.asked_max_tokens if self.degraded is not None else self.max_tokens
        before = self.degraded or Degraded(cap, asked, grant.overload_level)
        degraded = replace(before, max_tokens=cap, overload_level=grant.overload_level)
        return replace(self, max_tokens=cap, degraded=degraded)

    def resumed(self, emitted: Sequence[Sequence[int] | None]) -> Job:
        """With the tokens that its callers have."""
        sampling = self.sampling
        if emitted:  # the prompt was scored before its first token came
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self, is_resumed=True, emitted=emitted, sampling=sampling)

    def enqueue(self, traceparent: str) -> scheduler_pb2.Enqueue:
        """As the scheduler is told of it: a resumed one as if all its choices stood where the longest does."""
        open_ones = [tokens for tokens in self.emitted if tokens is not None]
        sequences = len(open_ones) if self.emitted else self.n
        longest = max(map(len, open_ones), default=0)
        return scheduler_pb2.Enqueue(
            request_id=self.request_id,
            tenant_id=self.tenant_id,
            qos_class=QOS_NUMBERS[self.qos_class],
            priority=self.priority,
            adapter_uid=self.adapter.uid if self.adapter else "",
            adapter_id=self.adapter.name if self.adapter else "",
            prompt_tokens=len(self.prompt_token_ids) + longest,
            max_new_tokens=(self.max_tokens - longest) * sequences,
            sequences=sequences,
            traceparent=traceparent,
            resumed=self.is_resumed,
            adapter_rank=self.adapter.rank if self.adapter else 0,
            pool="" if self.pool == DEFAULT_POOL else self.pool,
            key=_limits(self.limits),
        )

    def attributes(self) -> dict[str, AttributeValue]:
        return request_attributes(
            tenant=self.tenant_id,
            qos_class=self.qos_class.value,
            adapter=self.adapter.name if self.adapter else "",
            adapter_version=self.adapter.digest if self.adapter else "",
            adapter_number=self.adapter.version if self.adapter else 0,
            request_id=self.request_id,
        )


def _limits(limits: KeyLimits | None) -> scheduler_pb2.KeyLimits | None:
    if limits is None:
        return None
    return scheduler_pb2.KeyLimits(
        key_id=limits.key_id,
        requests_per_min=limits.requests_per_min,
        tokens_per_min=limits.tokens_per_min,
        concurrency=limits.concurrency,
    )
