"""What the quality gate and the load test ask of the cluster: requests like any of the tenant's, in its class batch,
behind its others, and charged to it.

Owns the time that a gate may take, and what is tried again within it. Knows no rule.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace

from manylora_shared.errors import AdapterFailed, Code, ManyloraError, Unready
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.sampling import Sampling
from manylora_shared.tenancy.adapter_gate import Against, Judge

from manylora_router.guard.admission import Adapter, ChatPrompt, Prompt, RequestInput, TextPrompt, TokenPrompt
from manylora_router.quality.report import Judged, Measured
from manylora_router.quality.samples import Sample
from manylora_router.request.frames import Finished, Frame

Generate = Callable[[RequestInput], AsyncGenerator[Frame]]
Tokenize = Callable[[RequestInput], Awaitable[tuple[Sequence[int], int]]]

AT_A_TIME = 8  # requests of one gate
LOAD_REQUESTS = 8  # of each version
LOAD_TOKENS = 16
_PRIORITY = "-100"
_BACKOFF_S = 0.25
_MAX_WAIT_S = 5.0
_LOSSES = 4  # of workers, routers' lines and so on, that one request may meet
_COMES_AGAIN = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class CandidateFailed(Exception):
    """The adapter itself does not run. The message is for people."""


class Inconclusive(Exception):
    """Nothing can be said of the adapter. The message says why."""


@dataclass(frozen=True)
class Subject:
    """Who is asked."""

    against: Against
    name: str = ""  # of a version in force: NAME@NUMBER; empty: the base model, or the candidate
    candidate: Adapter | None = None


@dataclass(frozen=True)
class _Answer:
    text: str
    prompt_logprobs: Sequence[float]
    finished: Finished

    @property
    def measured(self) -> Measured:
        timings, tokens = self.finished.timings, self.finished.usage.completion_tokens
        token_ms = (timings.total_ms - timings.ttft_ms) / (tokens - 1) if tokens > 1 else 0.0
        return Measured(timings.ttft_ms, token_ms, timings.adapter_wait_ms)


class Asking:
    """Of one tenant, in one gate. `authorization` is lent by the router's callers for so long."""

    def __init__(
        self, generate: Generate, tokenize: Tokenize, tenant_id: TenantId, authorization: str, pool: str
    ) -> None:
        self._generate = generate
        self._tokenize = tokenize
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._base = RequestInput(
            None,
            authorization=authorization,
            tenant=tenant_id,
            model=pool,
            request_class=QosClass.BATCH.value,
            priority=_PRIORITY,
            sampling=Sampling(temperature=0.0, seed=0),
            is_own=True,
        )

    async def answer(self, subject: Subject, sample: Sample, judge: str, max_tokens: int) -> Judged:
        """Its score is 0 but of perplexity. Raises CandidateFailed, Inconclusive."""
        prompt: Prompt = ChatPrompt(sample.messages) if sample.prompt is None else TextPrompt(sample.prompt)
        request = replace(self._base, prompt=prompt, max_tokens=sample.max_tokens or max_tokens)
        if judge == Judge.PERPLEXITY:
            return await self._scored(subject, request, sample.expected)
        return Judged((await self._ask(subject, request)).text, 0.0)

    async def measure(self, subject: Subject, token_ids: Sequence[int]) -> Measured:
        """Raises CandidateFailed, Inconclusive."""
        request = replace(self._base, prompt=TokenPrompt(token_ids), max_tokens=LOAD_TOKENS, ignore_eos=True)
        return (await self._ask(subject, request)).measured

    async def _scored(self, subject: Subject, request: RequestInput, expected: str) -> Judged:
        try:
            asked, _ = await self._tokenize(request)
            tail, _ = await self._tokenize(replace(request, prompt=TextPrompt(expected, add_special_tokens=False)))
        except ManyloraError as e:
            raise Inconclusive(e.message) from e
        scored = replace(
            request,
            prompt=TokenPrompt([*asked, *tail]),
            max_tokens=1,
            sampling=Sampling(temperature=0.0, seed=0, prompt_logprobs=0),
        )
        logprobs = (await self._ask(subject, scored)).prompt_logprobs[-len(tail) :]
        if len(logprobs) != len(tail):
            raise Inconclusive("the worker told no log-probabilities of the expected text")
        likelihood = math.exp(math.fsum(logprobs) / len(logprobs))
        return Judged(f"perplexity {1 / likelihood:.4g}" if likelihood else "perplexity beyond all bounds", likelihood)

    async def _ask(self, subject: Subject, request: RequestInput) -> _Answer:
        request = replace(request, adapter=subject.name, candidate=subject.candidate)
        losses = 0
        async with self._places:
            while True:
                try:
                    answer = await self._once(request)
                    if answer.finished.degraded is None:
                        return answer
                    wait_s = _BACKOFF_S  # what overload cut short is no answer to judge
                except AdapterFailed as e:
                    if subject.candidate is not None:
                        raise CandidateFailed(e.message) from e
                    raise Inconclusive(f"the version in force failed: {e.message}") from e
                except ManyloraError as e:
                    losses += e.code is Code.UNAVAILABLE
                    is_final = e.code is Code.RESOURCE_EXHAUSTED and e.retry_after_s is None
                    if e.code not in _COMES_AGAIN or is_final or losses > _LOSSES:
                        raise Inconclusive(e.message) from e
                    wait_s = min(_MAX_WAIT_S, max(e.retry_after_s or 0.0, _BACKOFF_S * 2**losses))
                await asyncio.sleep(wait_s)

    async def _once(self, request: RequestInput) -> _Answer:
        texts: list[str] = []
        logprobs: list[float] = []
        finished: Finished | None = None
        async with aclosing(self._generate(request)) as frames:
            async for frame in frames:
                logprobs += [each.logprob for each in frame.prompt_logprobs]
                texts += [frame.delta.text] if frame.delta is not None else []
                finished = frame.finished or finished
        if finished is None:
            raise Unready("the request ended without a last frame")
        return _Answer("".join(texts), logprobs, finished)


Lend = Callable[[TenantId], AbstractContextManager[str]]
