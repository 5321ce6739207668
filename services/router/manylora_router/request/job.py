"""An admitted request, as admission and its grant leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from manylora_shared.constraints.constraint import Constraint
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.sampling import Sampling
from manylora_shared.telemetry import request_attributes

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
    can_stream: bool = True  # False: all frames come at the end
    constraint: Constraint | None = None
    degraded: Degraded | None = None  # by overload; `max_tokens` is as it is in force

    @property
    def most_tokens(self) -> int:
        """If each choice takes all that it may."""
        return len(self.prompt_token_ids) + self.max_tokens * self.n

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt whose log-probabilities a worker tells."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1

    def as_granted(self, grant: Grant) -> Job:
        """With less output, where overload makes it so."""
        cap = grant.max_output_tokens
        if cap is None or cap >= self.max_tokens:
            return self
        asked = self.degraded.asked_max_tokens if self.degraded is not None else self.max_tokens
        degraded = Degraded(max_tokens=cap, asked_max_tokens=asked, overload_level=grant.overload_level)
        return replace(self, max_tokens=cap, degraded=degraded)

    def attributes(self) -> dict[str, str | bool | int | float]:
        return request_attributes(
            tenant=self.tenant_id,
            qos_class=self.qos_class.value,
            adapter=self.adapter.name if self.adapter else "",
            adapter_version=self.adapter.uid if self.adapter else "",
            adapter_number=self.adapter.version if self.adapter else 0,
            request_id=self.request_id,
        )
