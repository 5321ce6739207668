"""The one way from a request to its frames, for every front."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from manylora_shared.errors import ManyloraError, NotFound
from manylora_shared.telemetry import Attribute

from manylora_router.front.intake import Intake
from manylora_router.front.kept_answers import KeptAnswers
from manylora_router.guard import resume_tokens
from manylora_router.guard.admission import RequestInput
from manylora_router.request.call import Calls, draining
from manylora_router.request.frames import Frame


async def generate(
    request: RequestInput, *, intake: Intake, calls: Calls, kept: KeptAnswers | None = None
) -> AsyncGenerator[Frame]:
    """Close it (`contextlib.aclosing`). Raises ManyloraError, of a request that failed after its last frame.

    kept: answers that outlive their callers; None: this one is its caller's alone.
    """
    if kept is None or not (request.idempotency_key or request.keep_s or request.resume):
        async with aclosing(_run(request, intake, calls)) as frames:
            async for frame in frames:
                yield frame
        return
    tenant, request = intake.seen(request)
    begun, resume = intake.begun(request, tenant), request.resume
    answer = kept.find(tenant, request, begun.request_id if begun is not None else request.request_id)
    is_here = begun is not None and answer is not None and answer.request_id == begun.request_id
    if resume is not None and not resume.emitted and not is_here:
        raise NotFound(f"{resume_tokens.FIELD}: this router does not have the answer any more")
    if answer is None and not (request.idempotency_key or request.keep_s):
        async with aclosing(_run(request, intake, calls)) as frames:
            async for frame in frames:
                yield frame
        return
    if answer is None:
        answer = await kept.begin(tenant, request, lambda asked: _run(asked, intake, calls))
    if resume is None or is_here:
        reading = answer.read(resume.next_frame if resume is not None else 0)
    else:
        reading = answer.read_behind(resume.emitted)
    async with aclosing(reading) as frames:
        async for frame in frames:
            await intake.take_turn(tenant, request.qos_class)
            yield frame


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
