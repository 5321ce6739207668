"""The one way from a request to its frames, for every front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from manylora_shared.errors import AnswerLost, ManyloraError, NotFound, ServiceUnavailable
from manylora_shared.metadata import LAST_EVENT_ID
from manylora_shared.telemetry import Attribute

from manylora_router.front.far_answers import Asked, FarAnswer, FarAnswers, asked_of
from manylora_router.front.intake import Intake
from manylora_router.front.kept_answers import KeptAnswer, KeptAnswers
from manylora_router.guard import resume_tokens
from manylora_router.guard.admission import RequestInput
from manylora_router.request.call import Calls, draining
from manylora_router.request.frames import Frame

_TRIES_ELSEWHERE = 3
_TRY_AGAIN_S = 0.05


@dataclass(frozen=True)
class Outliving:
    """Answers that outlive their callers: this router's, and the others'."""

    kept: KeptAnswers
    far: FarAnswers


async def generate(
    request: RequestInput, *, intake: Intake, calls: Calls, outliving: Outliving | None = None
) -> AsyncGenerator[Frame]:
    """Close it (`contextlib.aclosing`). Raises ManyloraError, of a request that failed after its last frame.

    outliving: None: the answer is its caller's alone.
    """
    is_kept = request.idempotency_key or request.keep_s
    if outliving is None or not (is_kept or request.resume or request.is_again):
        async with aclosing(_run(request, intake, calls)) as frames:
            async for frame in frames:
                yield frame
        return
    tenant, request = intake.seen(request)
    async with AsyncExitStack() as stack:
        reading = await _reading(stack, tenant, request, intake, calls, outliving)
        if reading is None:
            async with aclosing(_run(request, intake, calls)) as frames:
                async for frame in frames:
                    yield frame
            return
        async with aclosing(reading) as frames:
            async for frame in frames:
                await intake.take_turn(tenant, request.qos_class)
                yield frame


async def _reading(
    stack: AsyncExitStack, tenant: str, request: RequestInput, intake: Intake, calls: Calls, outliving: Outliving
) -> AsyncGenerator[Frame] | None:
    """What the caller lacks of an answer that is kept, here or at another router; None: it is not one that is."""
    begun, resume = intake.begun(request, tenant), request.resume
    request_id = begun.request_id if begun is not None else request.request_id
    answer = outliving.kept.find(tenant, request, request_id)
    is_here = answer is not None and answer.request_id == request_id
    if not is_here and (request.is_again or (resume is not None and not resume.emitted)):
        field = resume_tokens.FIELD if resume is not None else LAST_EVENT_ID
        far = await outliving.far.seek(asked_of(tenant, request, request_id), field)
        stack.push_async_callback(far.close)
        return far.read()
    if answer is None:
        if not (request.idempotency_key or request.keep_s):
            return None
        asked = asked_of(tenant, request, begun.request_id if begun is not None else "")
        found = await _begin(tenant, request, asked, intake, calls, outliving)
        if isinstance(found, FarAnswer):
            stack.push_async_callback(found.close)
            return found.read()
        answer = found
    if resume is None:
        return answer.read(0)
    return answer.read_lacked(request_id, resume.next_frame, resume.emitted)


async def _begin(
    tenant: str,
    request: RequestInput,
    asked: Asked,
    intake: Intake,
    calls: Calls,
    outliving: Outliving,
) -> KeptAnswer | FarAnswer:
    """Here, or where its idempotency key is. Whoever has a part of the answer takes the key from a router that is not
    reached."""
    lost: ManyloraError | None = None
    for _ in range(_TRIES_ELSEWHERE):
        try:
            found = await outliving.kept.begin(tenant, request, lambda each: _run(each, intake, calls))
        except AnswerLost:
            if request.resume is None:
                raise
            break
        if isinstance(found, KeptAnswer):
            return found
        try:
            return await outliving.far.open(found.record, asked)
        except AnswerLost:
            if request.resume is None:
                raise
            break
        except NotFound:  # it is about to let go of the key
            await asyncio.sleep(_TRY_AGAIN_S)
        except ServiceUnavailable:
            lost = found.told
            break
    if lost is not None and request.resume is None:
        raise lost
    found = await outliving.kept.begin(tenant, request, lambda each: _run(each, intake, calls), takes_over=True)
    assert isinstance(found, KeptAnswer), "nobody is asked whose it is"
    return found


async def _run(request: RequestInput, intake: Intake, calls: Calls) -> AsyncGenerator[Frame]:
    tenant, refusal = "", None
    try:
        tenant, request = intake.seen(request)
    except ManyloraError as e:
        refusal = e  # raised inside the call, which then names no tenant
    with calls.open(request, tenant) as call:
        with call.admission() as span:
            if refusal is not None:
                raise refusal
            if calls.is_draining:
                raise draining()
            await intake.take_turn(tenant, request.qos_class)
            job, permit = await intake.admit(request, tenant, call)
            span.set(Attribute.PROMPT_TOKENS, len(job.prompt_token_ids))
            call.begin(job, permit)
        tape = calls.tapes.begin(tenant, request, call.request_id)
        try:
            while frames := await call.advance():
                if tape is not None:
                    tape.told(frames)
                for frame in frames:
                    await intake.take_turn(tenant, request.qos_class)
                    call.writes.begin()
                    yield frame
                    call.writes.end()
        finally:
            if tape is not None:
                tape.end()
