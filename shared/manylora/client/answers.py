"""What comes of a request: events, whole results, failures. Pure data, in the protos' names and units."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manylora_shared.errors import FieldViolation, QuotaBreach, RpcError


class RequestFailed(Exception):
    """A request that ended with a status other than OK.

    Attributes:
        code: the status's name, e.g. "RESOURCE_EXHAUSTED".
        reason: the ErrorInfo's, e.g. "OVERLOADED" or "QUOTA_EXCEEDED"; the code where the server gave none.
        retry_after_s: when trying again may help; None where it cannot.
        result: the stream's events before it failed; None where there were none.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str = "",
        violations: Iterable[FieldViolation] = (),
        retry_after_s: float | None = None,
        breaches: Iterable[QuotaBreach] = (),
        result: Result | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.reason = reason or code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.breaches = tuple(breaches)
        self.result = result

    @classmethod
    def of(cls, error: RpcError, result: Result | None = None) -> RequestFailed:
        return cls(
            error.code.name,
            error.message,
            reason=error.label.upper(),
            violations=error.violations,
            retry_after_s=error.retry_after_s,
            breaches=error.breaches,
            result=result,
        )

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "code": self.code,
            "reason": self.reason,
            "message": self.message,
            "violations": [dataclasses.asdict(v) for v in self.violations],
        }
        if self.breaches:
            told["quotas"] = [dataclasses.asdict(b) for b in self.breaches]
        if self.breaches or self.retry_after_s is not None:
            told["retry_after_s"] = self.retry_after_s
        return told


@dataclass(frozen=True)
class PositionLogprobs:
    # the token's log-probability, and (token id, log-probability) of the likeliest

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # of a prompt's token: how many are as likely, itself included


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    resumed: int = 0  # how often another worker went on with the answer


@dataclass(frozen=True)
class Timings:
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    adapter_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True)
class Degraded:
    """What overload took from a request that is served all the same."""

    max_tokens: int  # in force, per choice
    asked_max_tokens: int
    overload_level: int
    pool: str = ""  # where it runs instead of `asked_pool`; empty: where it was asked for
    asked_pool: str = ""
    not_streamed: bool = False


@dataclass(frozen=True)
class Started:
    request_id: str
    adapter_version: str
    seed: int
    prompt_tokens: int
    degraded: Degraded | None = None
    adapter: str = ""  # NAME@VERSION


@dataclass(frozen=True)
class PromptLogprobs:
    positions: tuple[PositionLogprobs, ...]  # the next ones of the prompt's tokens, from its second on


@dataclass(frozen=True)
class Delta:
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class ChoiceEnd:
    choice: int
    finish_reason: str
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Finished:
    outcome: str
    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    worker_id: str
    degraded: Degraded | None = None


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class Result:
    """`text`, `token_ids` and `finish_reason` are those of the first choice."""

    request_id: str
    adapter_version: str
    seed: int
    outcome: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    worker_id: str
    degraded: Degraded | None = None  # None: the answer is what was asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # of the prompt's tokens from its second on
    adapter: str = ""  # NAME@VERSION that answered; empty: the base model

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    def to_json(self) -> dict[str, Any]:
        """What `manylora generate --json` ends with; `choices` only where there are several."""
        answer: dict[str, Any] = {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "outcome": self.outcome,
            "usage": dataclasses.asdict(self.usage),
            "adapter": self.adapter,
            "adapter_version": self.adapter_version,
            "seed": self.seed,
            "worker_id": self.worker_id,
            "timings": dataclasses.asdict(self.timings),
        }
        if self.choices[0].logprobs:
            answer["logprobs"] = [dataclasses.asdict(p) for p in self.choices[0].logprobs]
        if self.prompt_logprobs:
            answer["prompt_logprobs"] = [dataclasses.asdict(p) for p in self.prompt_logprobs]
        if self.degraded is not None:
            answer["degraded"] = dataclasses.asdict(self.degraded)
        if len(self.choices) > 1:
            answer["choices"] = [dataclasses.asdict(c) for c in self.choices]
        return answer


class Collector:
    """Events in, Result out. Before a Finished, `result()` is of the events so far."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._texts: dict[int, list[str]] = {0: []}
        self._token_ids: dict[int, list[int]] = {0: []}
        self._logprobs: dict[int, list[PositionLogprobs]] = {0: []}
        self._prompt_logprobs: list[PositionLogprobs] = []

    @property
    def is_empty(self) -> bool:
        return self._started is None and self._finished is None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self._finished = event
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs += event.positions
        else:
            self._texts.setdefault(event.choice, []).append(event.text)
            self._token_ids.setdefault(event.choice, []).extend(event.token_ids)
            self._logprobs.setdefault(event.choice, []).extend(event.logprobs)

    def result(self) -> Result:
        started = self._started or Started("", "", 0, 0)
        finished = self._finished or Finished("", (), Usage(), Timings(), "")
        ends = {end.choice: end for end in finished.choices}
        return Result(
            request_id=started.request_id,
            adapter_version=started.adapter_version,
            seed=started.seed,
            outcome=finished.outcome,
            choices=tuple(self._choice(i, ends.get(i)) for i in sorted(set(self._texts) | set(ends))),
            usage=finished.usage,
            timings=finished.timings,
            worker_id=finished.worker_id,
            degraded=finished.degraded or started.degraded,
            prompt_logprobs=tuple(self._prompt_logprobs),
            adapter=started.adapter,
        )

    def _choice(self, index: int, end: ChoiceEnd | None) -> Choice:
        return Choice(
            text="".join(self._texts.get(index, [])),
            token_ids=tuple(self._token_ids.get(index, [])),
            finish_reason=end.finish_reason if end else "",
            stop_string=end.stop_string if end else None,
            stop_token_id=end.stop_token_id if end else None,
            logprobs=tuple(self._logprobs.get(index, [])),
        )
