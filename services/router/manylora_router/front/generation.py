"""The one way from a request to its frames, for every front."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from manylora_shared.errors import ManyloraError
from manylora_shared.telemetry import Attribute

from manylora_router.front.intake import Intake
from manylora_router.guard.admission import RequestInput
from manylora_router.request.call import Calls
from manylora_router.request.frames import Frame


async def generate(request: RequestInput, *, intake: Intake, calls: Calls) -> AsyncGenerator[Frame]:
    """Close it (`contextlib.aclosing`). Raises ManyloraError, of a request that failed after its last frame."""
    tenant, refusal = "", None
    try:
        tenant, request = intake.seen(request)
    except ManyloraError as e:
        refusal = e  # raised inside the call, which then names no tenant
    with calls.open(request, tenant) as call:
        with call.admission() as span:
            if refusal is not None:
                raise refusal
            await intake.take_turn(tenant, request.qos_class)
            job, permit = await intake.admit(request, tenant, call)
            span.set(Attribute.PROMPT_TOKENS, len(job.prompt_token_ids))
            call.begin(job, permit)
        while frames := await call.advance():
            for frame in frames:
                await intake.take_turn(tenant, request.qos_class)
                call.writes.begin()
                yield frame
                call.writes.end()
