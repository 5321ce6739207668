"""From a request as a front read it to a job that may be queued: the checks in order, what costs least first. Owns only
the turns; admission, overload view and guard decide.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from manylora_shared.constraints.constraint import Constraint
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import (
    InvalidRequest,
    ManyloraError,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    ServiceUnavailable,
    Unready,
)
from manylora_shared.ids import DEFAULT_POOL, AdapterName, QosClass, TenantId
from manylora_shared.sampling import Sampling, barred_too_much
from manylora_shared.telemetry import Attribute
from manylora_shared.tenancy.adapter_line import StickyKeys
from manylora_shared.tenancy.degrade import FIRST_LEVEL, NOTHING, Step, Taken, taken
from manylora_shared.tenancy.identity import key_id_of
from manylora_shared.tenancy.overload import retry_after_s
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.wire import QOS_NUMBERS

from manylora_router.guard import admission, resume_tokens
from manylora_router.guard.admission import (
    Adapter,
    ChatPrompt,
    ModelLimits,
    Prompt,
    RequestInput,
    TextPrompt,
    TokenPrompt,
)
from manylora_router.guard.permits import Permit
from manylora_router.guard.pools import ModelNames, choose, names_of
from manylora_router.guard.resume_tokens import Begun
from manylora_router.ledger.budgets import Budgets
from manylora_router.links.callers import Callers
from manylora_router.links.directory import Directory, Model
from manylora_router.links.loop_turns import Flow, LoopTurns, PoolTurns
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.request.call import Call, Calls
from manylora_router.request.frames import Degraded
from manylora_router.request.job import Job
from manylora_router.text.constraints import MAX_SECONDS, MAX_WAIT_S, NUM_PLACES, ConstraintCheck
from manylora_router.text.service import TextService
from manylora_router.text.stop_strings import StopStrings
from manylora_router.text.texts import Texts

# before the caller's deadline (at most a tenth of the time), so that the frame that says so can still be read
DEADLINE_MARGIN_S = 0.02
_TEXT_COST = 64  # of a text in characters, beside its own


@dataclass(frozen=True)
class Models:
    """Those that a caller may name. The first fields are of the one that a request gets which names none."""

    base_model: str
    max_context_tokens: int
    sampling_defaults: Mapping[str, Any]  # numbers, where a request sets none
    adapters: Sequence[AdapterRecord]  # the caller's, by name
    compositions: Mapping[AdapterName, str]  # the caller's, by name: adapters with weights
    pools: Sequence[tuple[str, str, Model]]  # name, pool and model of each, that one first


class Intake:
    def __init__(
        self,
        *,
        directory: Directory,
        callers: Callers,
        scheduler: SchedulerClient,
        texts: Texts,
        calls: Calls,
        budgets: Budgets,
        rng: random.Random,
        default_max_tokens: int,
    ) -> None:
        self._directory = directory
        self._callers = callers
        self._scheduler = scheduler
        self._texts = texts
        self._calls = calls
        self._budgets = budgets
        self._guard = calls.guard
        self._rng = rng
        self._default_max_tokens = default_max_tokens
        self._turns = LoopTurns()
        self._text_turns = PoolTurns(texts.default.num_threads)
        self._constraints = ConstraintCheck()
        self._constraint_turns = PoolTurns(NUM_PLACES)
        # a tenant has one place at a time: others' constraints are looked at beside its slow ones
        self._own_constraint_turns: WeakValueDictionary[str, PoolTurns] = WeakValueDictionary()

    def tenant_of(self, request: RequestInput) -> str:
        """Raises Unauthenticated or PermissionDenied."""
        return admission.tenant_of(self._callers.known(request.authorization), request.tenant)

    def seen(self, request: RequestInput) -> tuple[str, RequestInput]:
        """The tenant, and the request in the class that its token is for. Raises as `tenant_of`."""
        principal = self._callers.known(request.authorization)
        tenant = admission.tenant_of(principal, request.tenant)
        if principal.limits is not None:
            request = replace(request, limits=principal.limits)
        if not principal.qos_class or request.request_class == principal.qos_class:
            return tenant, request
        if request.request_class:
            raise PermissionDenied(f"this token is for requests of class {principal.qos_class}")
        return tenant, replace(request, request_class=principal.qos_class)

    async def take_turn(self, tenant: str, qos_class: QosClass | None) -> None:
        await self._turns.take((tenant, qos_class), self._weight(tenant, qos_class))

    def _weight(self, tenant: str, qos_class: QosClass | None) -> int:
        policy = self._directory.policy_of(TenantId(tenant))
        return policy.weight(qos_class) if policy is not None and qos_class is not None else 1

    def models(self, request: RequestInput) -> Models:
        policy, _ = admission.admit_caller(
            self.tenant_of(request), "", self._directory.policy_of, self._directory.line_of, StickyKeys(""), lambda _: 0
        )
        model, models = self._model(policy.pools[0]), self._directory.models
        names = names_of(policy.pools, models).pools.items()
        own = {pool: name for name, pool in reversed(list(names))}  # the first of each
        served = [record for record in self._directory.adapters_of(policy.tenant_id) if record.line.served]
        return Models(
            model.name,
            model.limits.max_context_tokens,
            model.sampling_defaults,
            served,
            {name: parts for name, parts in policy.compositions.items() if name not in {each.name for each in served}},
            [(own[pool], pool, models[pool]) for pool in policy.pools if pool in models],
        )

    def names(self, tenant: str) -> ModelNames:
        """Of a tenant that may be none."""
        return names_of(self._directory.pools_of(TenantId(tenant)), self._directory.models)

    def pool_of(self, tenant: str, model: str, adapter: str) -> str:
        """Where `admit` will find that a request goes, or any pool if it will refuse it."""
        request = RequestInput(None, tenant=tenant, model=model, adapter=adapter)
        try:
            return self._place(tenant, request, "")[2]
        except ManyloraError:
            return DEFAULT_POOL

    async def tokenize(self, request: RequestInput) -> tuple[Sequence[int], int]:
        """The prompt's tokens, and how many a request may have with its answer. Raises Rejected."""
        tenant, pool, limits = self._reader_of(request)
        text = await self._texts.of(pool)
        return await self._tokenize(text, request.prompt, (tenant, request.qos_class)), limits.max_context_tokens

    async def detokenize(self, request: RequestInput) -> str:
        """The text of a TokenPrompt. Raises Rejected."""
        tenant, pool, limits = self._reader_of(request)
        text = await self._texts.of(pool)
        assert isinstance(request.prompt, TokenPrompt)
        token_ids = request.prompt.ids
        if len(token_ids) > limits.max_context_tokens:
            most = limits.max_context_tokens
            raise InvalidRequest.of("prompt.token_ids", f"has {len(token_ids)} tokens; the model's context is {most}")
        async with self.text_turn((tenant, request.qos_class), len(token_ids)):
            return await text.decode(token_ids)

    def _reader_of(self, request: RequestInput) -> tuple[str, str, ModelLimits]:
        """The tenant of a prompt that may be read, and the pool whose model reads it."""
        tenant = self.tenant_of(request)
        _, adapter, pool = self._place(tenant, request, "")
        limits = self._model(pool).limits.with_adapter(adapter)
        if violations := admission.check(request, limits):
            raise InvalidRequest.of_all(violations)
        return tenant, pool, limits

    @property
    def base_model(self) -> str:
        """Of the default pool. Empty while no worker of it was ever seen."""
        model = self._directory.model
        return model.name if model is not None else ""

    def model_of(self, pool: str) -> Model | None:
        """None while no worker of it was ever seen."""
        return self._directory.models.get(pool)

    def unready(self) -> str:
        """Why no request would be taken; empty: one would be."""
        if self._calls.is_draining:
            return "this router is stopping"
        if not self._directory.models:
            return "no worker has joined the cluster yet"
        return "" if self._scheduler.is_connected else "the scheduler is not reached"

    async def admit(self, request: RequestInput, tenant: str, call: Call) -> tuple[Job, Permit]:
        """`tenant`: what `tenant_of` gave. Raises Rejected, or ServiceUnavailable while there is no model."""
        begun = self.begun(request, tenant)
        if begun is not None:
            request = resume_tokens.go_on(request, begun)
        policy, adapter, pool = self._place(tenant, request, call.request_id)
        call.adapter = adapter
        call.goes_to(pool)
        taken, asked_pool = NOTHING, pool
        if begun is None:
            self._budgets.check(policy)
            self._check_overload(policy.tenant_id, request, call.request_id, pool)
            taken, pool = self._degrade(policy, request, call.request_id, pool, adapter)
            call.goes_to(pool)
        if adapter is not None:
            call.span.set(Attribute.ADAPTER_VERSION, adapter.digest)
            call.span.set(Attribute.ADAPTER_NUMBER, adapter.version)
        model, text = self._model(pool), await self._texts.of(pool)
        limits = model.limits.with_adapter(adapter)
        violations = admission.check(request, limits)
        prompt_token_ids: Sequence[int] | None = None
        if admission.prompt_is_readable(request.prompt, violations):
            prompt_token_ids = await self._tokenize(text, request.prompt, (tenant, request.qos_class))
        admitted = admission.admit(
            request, prompt_token_ids, violations, policy, limits, default_max_tokens=self._default_max_tokens
        )
        if request.stop and not text.has_text:
            raise Unready("stop: this router has no tokenizer; send stop_token_ids")
        stop_tokens = text.stop_tokens(request.stop) if request.stop else {}
        stop_tokens = {each: stop for each, stop in stop_tokens.items() if each < model.limits.vocab_size}
        ends = model.eos_token_ids or [each for each in text.end_token_ids if each < model.limits.vocab_size]
        stop_token_ids = _stop_token_ids(request, stop_tokens, ends)
        bad_sequences = await self._bad_sequences(text, request, (tenant, request.qos_class), stop_token_ids, model)
        constraint = await self._constraint(request, admitted.prompt_token_ids, tenant)
        call.span.set(Attribute.MAX_TOKENS, admitted.max_tokens)
        may_stream = policy.security.can_stream and Step.NO_STREAM not in taken.steps
        max_tokens, degraded = _degraded(taken, admitted.max_tokens, request, asked_pool, pool)
        job = Job(
            request_id=call.request_id,
            tenant_id=policy.tenant_id,
            qos_class=admitted.qos_class,
            priority=admitted.priority,
            adapter=adapter,
            prompt_token_ids=admitted.prompt_token_ids,
            max_tokens=max_tokens,
            n=admitted.n,
            sampling=self._sampling(policy.tenant_id, request, model),
            stop=StopStrings(request.stop) if request.stop else None,
            stop_tokens=stop_tokens,
            stop_token_ids=stop_token_ids,
            bad_sequences=bad_sequences,
            constraint=constraint,
            received_at=call.received_at,
            deadline=_deadline(request, call.received_at),
            traceparent=call.span.traceparent,
            pool=pool,
            degraded=degraded,
            can_stream=may_stream,
            is_resumable=request.is_resumable and may_stream,
            is_hedge=request.is_hedge,
            limits=request.limits,
            key_id=key_id_of(request.authorization),
        )
        if begun is not None:
            job = self._taken_over(job, request, begun, policy, model)
        digest = adapter.digest if adapter is not None else None
        now = asyncio.get_running_loop().time()
        return job, self._guard.admit(job.tenant_id, digest, job.prompt_token_ids, now)

    def begun(self, request: RequestInput, tenant: str) -> Begun | None:
        """What the request goes on with; None: it is a new one. Raises InvalidRequest."""
        if request.resume is None:
            return None
        return self._calls.tokens.open(request.resume.token, tenant, self._calls.now_unix_s())

    def _can_go_on(self, policy: TenantPolicy) -> bool:
        now = asyncio.get_running_loop().time()
        return self._calls.resumes.take(policy.tenant_id, policy.quotas, now)

    def _taken_over(self, job: Job, request: RequestInput, begun: Begun, policy: TenantPolicy, model: Model) -> Job:
        """Raises InvalidRequest, or QuotaExceeded."""
        assert request.resume is not None
        resume_tokens.check(request, begun, job.prompt_token_ids, model.limits.vocab_size)
        if not self._can_go_on(policy):
            raise QuotaExceeded("quotas.resumes_per_s: no more answers are gone on with for now", retry_after_s=1.0)
        degraded = None
        if begun.asked_max_tokens != begun.max_tokens:
            degraded = Degraded(begun.max_tokens, begun.asked_max_tokens, begun.overload_level)
        charged = request.charged_tokens
        return replace(job, delivered=request.resume.emitted, charged_tokens=charged, degraded=degraded)

    def _place(self, tenant: str, request: RequestInput, request_id: str) -> tuple[TenantPolicy, Adapter | None, str]:
        """The caller's policy, its adapter (None: the base model), and the pool."""
        directory, sticky = self._directory, StickyKeys(request_id, request.conversation, request.user)
        policy, adapter = admission.admit_caller(
            tenant, request.adapter, directory.policy_of, directory.line_of, sticky, directory.max_lora_rank_of
        )
        adapter = request.candidate or adapter
        return policy, adapter, choose(policy, request.model, adapter, directory.models)

    def _model(self, pool: str) -> Model:
        model = self._directory.models.get(pool)
        if model is None:
            which = "the cluster" if pool == DEFAULT_POOL else f"pool {pool}"
            raise ServiceUnavailable(f"no worker has joined {which} yet", retry_after_s=1.0)
        return model

    def _check_overload(self, tenant_id: TenantId, request: RequestInput, request_id: str, pool: str) -> None:
        """Raises Overloaded. It comes before the prompt is looked at: refusing must cost next to nothing."""
        view, qos_class = self._scheduler.overload(pool), request.qos_class
        if view.is_quiet or qos_class is None:
            return
        if not view.admits(tenant_id, qos_class, request_id):
            self._scheduler.note_refused(tenant_id, QOS_NUMBERS[qos_class], pool)
            level = view.level_of(tenant_id, qos_class)
            why = view.why_refused(tenant_id, qos_class)
            raise Overloaded(why, retry_after_s=retry_after_s(level, request_id))

    def _degrade(
        self, policy: TenantPolicy, request: RequestInput, request_id: str, pool: str, adapter: Adapter | None
    ) -> tuple[Taken, str]:
        """What overload takes from it by its tenant's policy, and the pool where it runs then."""
        qos_class = request.qos_class
        if not policy.degrade.steps or qos_class is None:
            return NOTHING, pool
        found = taken(policy.degrade, self._scheduler.overload(pool), policy.tenant_id, qos_class, request_id)
        smaller = policy.degrade.pool
        if Step.SMALLER_POOL not in found.steps or smaller == pool or smaller not in policy.pools:
            return found, pool
        model = self._directory.models.get(smaller)
        is_full = self._scheduler.overload(smaller).level_of(policy.tenant_id, qos_class) >= FIRST_LEVEL
        if model is None or adapter is not None or is_full or not admission.is_movable(request, model.limits):
            return found, pool
        return found, smaller

    def text_turn(self, flow: Flow, num_characters: int) -> AbstractAsyncContextManager[None]:
        """For work on text that an event loop's turn is too short for."""
        return self._text_turns.hold(flow, self._weight(*flow), _TEXT_COST + num_characters)

    async def _tokenize(self, text: TextService, prompt: Prompt | None, flow: Flow) -> Sequence[int]:
        match prompt:
            case TextPrompt(words, add_special_tokens):
                async with self.text_turn(flow, len(words)):
                    return await text.encode(words, add_special_tokens)
            case ChatPrompt(messages):
                size = sum(len(role) + len(content) for role, content in messages)
                async with self.text_turn(flow, size + admission.json_bytes(prompt)):
                    return await text.encode_chat(
                        messages,
                        add_generation_prompt=prompt.has_generation_prompt,
                        continue_final_message=prompt.continue_final_message,
                        template_kwargs=prompt.template_kwargs,
                        tools=prompt.tools,
                        more=prompt.more,
                    )
            case TokenPrompt(ids):
                return ids
            case None:
                raise AssertionError("a missing prompt is not readable")

    def _sampling(self, tenant_id: TenantId, request: RequestInput, model: Model) -> Sampling:
        # without words, and with a seed: the caller's own, or its idempotency key's, or a drawn one
        seed, key = request.sampling.seed, request.idempotency_key
        if seed is None:
            seed = admission.seed_of_key(tenant_id, key, request.part) if key else self._rng.getrandbits(64)
        return replace(request.sampling.or_else(model.sampling_defaults), seed=seed, bad_words=())

    async def _constraint(self, request: RequestInput, prompt: Sequence[int], tenant: str) -> Constraint | None:
        """The answer's. Raises as `_check_constraint`."""
        await self._check_constraint(request, request.constraint, tenant)
        if request.constraint_after is None:
            return request.constraint
        constraint = request.constraint_after(prompt)
        await self._check_constraint(request, constraint, tenant)
        return constraint

    async def _check_constraint(self, request: RequestInput, constraint: Constraint | None, tenant: str) -> None:
        """Raises InvalidRequest, Overloaded or ServiceUnavailable."""
        if constraint is None or self._constraints.is_known(tenant, constraint):
            return
        if violations := constraint.violations():
            raise InvalidRequest.of_all(violations)
        flow, cost = (tenant, request.qos_class), _TEXT_COST + constraint.size_bytes
        own = self._own_constraint_turns.setdefault(tenant, PoolTurns(1))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    for turns in (own, self._constraint_turns):
                        await held.enter_async_context(turns.hold(flow, self._weight(*flow), cost))
            except TimeoutError:
                raise Overloaded("other constraints are being compiled here", retry_after_s=MAX_SECONDS) from None
            if self._constraints.is_known(tenant, constraint):  # by now: many calls may bring one that is new
                return
            violation = await self._constraints.violation(tenant, constraint)
        if violation is not None:
            raise InvalidRequest.of_all([violation])

    def close(self) -> None:
        self._constraints.close()

    async def _bad_sequences(
        self, text: TextService, request: RequestInput, flow: Flow, stop_token_ids: Sequence[int], model: Model
    ) -> Sequence[Sequence[int]]:
        """Raises InvalidRequest where these, with all that is barred besides, are too much."""
        words = request.sampling.bad_words
        found: Sequence[Sequence[int]] = []
        if words:
            async with self.text_turn(flow, sum(_TEXT_COST + len(word) for word in words)):
                found = await text.encode_words(words)
        stops = stop_token_ids if request.sampling.min_tokens else ()
        allowed = request.sampling.allowed_token_ids
        problem = barred_too_much(found, stops, model.limits.vocab_size, allowed)
        if problem:
            raise InvalidRequest.of("sampling.bad_words" if words else "sampling.min_tokens", problem)
        return found


def _degraded(
    taken: Taken, max_tokens: int, request: RequestInput, asked_pool: str, pool: str
) -> tuple[int, Degraded | None]:
    """The bound in force, and what is told of it."""
    cap = taken.max_tokens
    most = max_tokens if cap is None else min(max_tokens, max(cap, request.sampling.min_tokens))
    told = Degraded(most, max_tokens, taken.level, not_streamed=Step.NO_STREAM in taken.steps)
    if pool != asked_pool:
        told = replace(told, pool=pool, asked_pool=asked_pool)
    elif most == max_tokens and not told.not_streamed:
        return max_tokens, None
    return most, told


def _stop_token_ids(request: RequestInput, stop_tokens: Collection[int], ends: Sequence[int]) -> list[int]:
    ids = dict.fromkeys([*request.stop_token_ids, *stop_tokens])
    if not request.ignore_eos:
        ids.update(dict.fromkeys(ends))
    return list(ids)


def _deadline(request: RequestInput, received_at: float) -> float | None:
    remaining_s = request.time_remaining_s
    if remaining_s is None:
        return None
    return received_at + remaining_s - min(DEADLINE_MARGIN_S, 0.1 * max(0.0, remaining_s))
