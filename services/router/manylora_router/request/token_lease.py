"""What one request may hand out of its tenant's tokens, and what it has used.

Tokens go on as far as the lease covers them; the rest waits for it to grow, or the request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from manylora.v1 import worker_pb2
from manylora_shared.errors import QuotaExhausted

from manylora_router.links.scheduler_client import Lease, SchedulerClient
from manylora_router.request.choices import Choices
from manylora_router.request.deadline import Deadline
from manylora_router.request.job import Job

LEASE_WAIT_S = 10.0  # for the scheduler's answer: longer than a change of leaders takes
_MIN_LEFT_TOKENS = 16  # an answer takes less than a stream takes for these


class Charge(NamedTuple):
    prompt: int = 0
    cached: int = 0  # of the prompt
    completion: int = 0  # that was handed out
    unread: int = 0  # drawn for a request that was cut short, and handed out to nobody

    @property
    def total(self) -> int:
        return self.prompt - self.cached + self.completion + self.unread


class TokenLease:
    """`settle` it, granted or not."""

    def __init__(self, job: Job, choices: Choices, scheduler: SchedulerClient) -> None:
        self.when_settled: Callable[[], None] = lambda: None
        self.kv_byte_seconds = self.adapter_byte_seconds = 0.0  # on all workers that told
        self._request_id = job.request_id
        self._deadline = job.deadline
        self._num_prompt_tokens = len(job.prompt_token_ids)
        self._choices = choices
        self._scheduler = scheduler
        self._is_begun = False
        self._word = worker_pb2.ExecuteFinished()
        self._least_output_tokens = 0
        self._num_emitted = 0  # of earlier workers
        self._num_cached = 0  # of the prompt, on the worker that had most
        self._num_paid: int | None = None  # output that another router charged, with the prompt
        self._is_handed_over = self._is_forgiven = False
        self._rest: worker_pb2.ExecuteResponse | None = None  # of the last message, what the lease did not cover
        self.was_held_up = False  # the stream waited for its lease, and so did not read from the worker

    def begin(self) -> None:
        """A worker has begun: the prompt is used, unless the worker's word is another."""
        self._is_begun = True

    def resumed(self) -> None:
        """Another worker goes on: what is computed again is not charged, nor what was drawn and is not here."""
        self._word = worker_pb2.ExecuteFinished()
        self._least_output_tokens = 0
        self._num_emitted = self._choices.num_tokens

    def taken_over(self, charged_tokens: int = 0) -> None:
        """From another router, which has charged the prompt, the tokens that are here, and those of the answer: it told
        them to another caller.
        """
        self._num_paid = max(self._choices.num_tokens, charged_tokens)
        self.resumed()

    def hand_over(self) -> None:
        """To another router, which makes again what was drawn and is not here."""
        self._is_handed_over = True

    def forgive(self) -> None:
        """Nothing of it was handed out, and nothing is charged."""
        self._is_forgiven = True

    def ended(self, word: worker_pb2.ExecuteFinished) -> None:
        """The worker's last word of a request that is charged what was handed out."""
        self._word = word
        self.kv_byte_seconds += word.kv_byte_seconds
        self.adapter_byte_seconds += word.adapter_byte_seconds
        self._num_cached = max(self._num_cached, word.cached_prompt_tokens)

    def cut_short(self, word: worker_pb2.ExecuteFinished) -> None:
        """As `ended`, of one that is charged what was computed, read or not."""
        self.ended(word)
        if self._is_handed_over:
            return
        self._least_output_tokens = self._num_emitted + word.output_tokens

    @property
    def used_prompt_tokens(self) -> int:
        if self._word.HasField("prompt_tokens") and not self._num_emitted:
            return min(self._word.prompt_tokens, self._num_prompt_tokens)
        return self._num_prompt_tokens * self._is_begun

    @property
    def cached_prompt_tokens(self) -> int:
        return min(self._num_cached, self.used_prompt_tokens)

    @property
    def used_tokens(self) -> int:
        return self.used_prompt_tokens + self._choices.num_tokens

    @property
    def charge(self) -> Charge:
        """By now."""
        given = self._choices.num_tokens
        unread = max(0, self._least_output_tokens - given)
        if self._is_forgiven:
            return Charge()
        if self._num_paid is not None:
            return Charge(completion=max(0, given - self._num_paid), unread=unread)
        return Charge(self.used_prompt_tokens, self.cached_prompt_tokens, given, unread)

    @property
    def has_tokens(self) -> bool:
        tokens = self._scheduler.lease(self._request_id).tokens
        return tokens is None or tokens > self.used_tokens

    def settle(self) -> None:
        """Cached tokens of the prompt are not charged. Idempotent."""
        self._scheduler.settle(self._request_id, self.charge.total)
        self.when_settled()

    async def cover(
        self, read: Callable[[], Awaitable[worker_pb2.ExecuteResponse]], most_tokens: int
    ) -> worker_pb2.ExecuteResponse:
        """The worker's next message, as far as the lease covers it. Raises QuotaExhausted."""
        message = self._rest if self._rest is not None else await read()
        self._rest = None
        lease = self._scheduler.lease(self._request_id)
        if lease.tokens is None:
            return message
        goes_on = self._choices.goes_on
        coming = sum(len(choice.token_ids) for choice in message.tokens.choices if goes_on(choice.choice))
        if not coming:
            return message
        if lease.tokens <= self.used_tokens:
            await self._wait_for_tokens(lease)
            if lease.tokens is None:
                return message  # the quota was taken away meanwhile
        left = lease.tokens - self.used_tokens
        if coming > left:
            message, self._rest = _split(message, left, goes_on)
        if lease.tokens < most_tokens and left - coming < _MIN_LEFT_TOKENS:
            self._scheduler.want_more(self._request_id)
        return message

    async def _wait_for_tokens(self, lease: Lease) -> None:
        """Raises QuotaExhausted."""
        self.was_held_up = True
        has_asked = False
        while lease.tokens is not None and lease.tokens <= self.used_tokens:
            if has_asked and lease.refusal is not None:
                raise lease.refusal
            self._scheduler.want_more(self._request_id)
            has_asked = True
            try:
                async with Deadline(self._deadline), asyncio.timeout(LEASE_WAIT_S):
                    await lease.changed.wait()
            except TimeoutError:
                text = "the scheduler did not say whether the tenant's quota has more tokens"
                raise QuotaExhausted(text, retry_after_s=1.0) from None


def _split(
    message: worker_pb2.ExecuteResponse, tokens: int, goes_on: Callable[[int], bool]
) -> tuple[worker_pb2.ExecuteResponse, worker_pb2.ExecuteResponse]:
    """Ends of choices stay behind their last token."""
    head, rest = worker_pb2.ExecuteResponse(frame=message.frame), worker_pb2.ExecuteResponse(frame=message.frame)
    head.tokens.prompt_logprobs.extend(message.tokens.prompt_logprobs)
    for part in message.tokens.choices:
        if not goes_on(part.choice):
            continue
        taken = min(tokens, len(part.token_ids))
        tokens -= taken
        if taken == len(part.token_ids):
            head.tokens.choices.append(part)
            continue
        if taken:
            head.tokens.choices.add(
                choice=part.choice,
                first_position=part.first_position,
                token_ids=part.token_ids[:taken],
                logprobs=part.logprobs[:taken],
            )
        behind = rest.tokens.choices.add()
        behind.CopyFrom(part)
        behind.first_position = part.first_position + taken
        del behind.token_ids[:taken]
        del behind.logprobs[:taken]
    return head, rest
