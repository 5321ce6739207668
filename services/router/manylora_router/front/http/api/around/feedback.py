"""POST /v1/feedback: a score for an earlier answer."""

from __future__ import annotations

from manylora.v1 import inference_pb2
from manylora_shared.metadata import CALLER_KEY, TENANT_KEY
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY, host_of

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.exchange import Exchange

_THUMBS = {"up": 1.0, "down": 0.0}


async def feedback(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    request_id, score, thumb = fields.text("request_id"), fields.number("score"), fields.text("thumb")
    if thumb and thumb not in _THUMBS:
        fields.wrong("thumb", "must be up or down")
    elif (score is None) == (not thumb):
        fields.wrong("score", "must be given, or thumb in its place")
    fields.close()
    fields.check()
    caller = asked.caller_of(exchange.headers)
    given = score if score is not None else _THUMBS[thumb]
    request = inference_pb2.GiveFeedbackRequest(request_id=request_id, score=given)
    metadata = {AUTHORIZATION_KEY: caller.authorization, TENANT_KEY: caller.tenant, CALLER_KEY: host_of(exchange.peer)}
    answer = await door.feedback.give(exchange.tenant, request, {k: v for k, v in metadata.items() if v})
    told = {"object": "feedback", "request_id": request_id, "adapter": answer.adapter or None}
    await exchange.answer({**told, "score": given, "counted": answer.counted})
