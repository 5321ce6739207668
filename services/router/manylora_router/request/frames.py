"""What a caller reads of its request: plain data, with inference.proto's fields, for every front to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manylora.v1 import common_pb2
from manylora_shared.tenancy.quota import QuotaLevel


@dataclass(frozen=True, slots=True)
class Degraded:
    max_tokens: int
    asked_max_tokens: int
    overload_level: int
    pool: str = ""  # where it runs instead of `asked_pool`; empty: where it was asked for
    asked_pool: str = ""
    not_streamed: bool = False


@dataclass(slots=True)
class Delta:
    choice: int
    first_position: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    adapter: str  # NAME@VERSION; empty: the base model
    adapter_version: str
    seed: int
    prompt_token_ids: Sequence[int]
    degraded: Degraded | None
    levels: Sequence[QuotaLevel] = ()  # of the tenant's quotas, behind this request
    resume_token: str = ""
    head: Sequence[Delta] = ()  # what the caller has already, of another router


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    choice: int
    finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: common_pb2.Outcome
    choices: Sequence[ChoiceEnd]
    usage: common_pb2.Usage
    timings: common_pb2.Timings
    worker_id: str
    degraded: Degraded | None


@dataclass(slots=True)
class Frame:
    """At least one of the four, which happened in this order."""

    number: int = 0
    started: Started | None = None
    prompt_logprobs: Sequence[common_pb2.PositionLogprobs] = ()  # the next ones of the prompt, from its second token on
    delta: Delta | None = None
    finished: Finished | None = None

    def merge(self, later: Frame) -> None:
        self.started = later.started or self.started
        self.prompt_logprobs = [*self.prompt_logprobs, *later.prompt_logprobs]
        self.delta = later.delta or self.delta
        self.finished = later.finished or self.finished
