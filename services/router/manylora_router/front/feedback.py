"""Callers' scores of earlier answers, whichever router gave them: one that does not remember asks the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from manylora.v1 import inference_pb2
from manylora_shared.errors import Code, InvalidRequest, NotFound, RpcError, ServiceUnavailable
from manylora_shared.ids import TenantId
from manylora_shared.transport.base import methods_of
from manylora_shared.transport.places import Places

from manylora_router.links.other_routers import OtherRouters
from manylora_router.request.call import Calls

_GIVE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["GiveFeedback"]
ASKING = 64  # calls that wait for other routers: each opens a line to every one of them
_ASKING_KEPT = 16
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of HTTP answers' ids, before the request's


def request_id_of(answer_id: str) -> str:
    """Of the request's own id, itself."""
    prefix = next((each for each in _PREFIXES if answer_id.startswith(each)), "")
    return answer_id.removeprefix(prefix)


class FeedbackDesk:
    def __init__(self, calls: Calls, others: OtherRouters) -> None:
        self._calls = calls
        self._others = others
        self._asking = Places(ASKING, kept=_ASKING_KEPT, few=2)

    async def give(
        self, tenant: str, request: inference_pb2.GiveFeedbackRequest, metadata: Mapping[str, str]
    ) -> inference_pb2.GiveFeedbackResponse:
        """`metadata`: the caller's: its key is shown to the other routers.

        Raises InvalidRequest, NotFound, ServiceUnavailable where a router that may remember it did not answer, or
        Overloaded where the tenant asks too many at once.
        """
        if not request.request_id:
            raise InvalidRequest.of("request_id", "is missing")
        if not (math.isfinite(request.score) and 0.0 <= request.score <= 1.0):
            raise InvalidRequest.of("score", "must be from 0 to 1")
        request_id = request_id_of(request.request_id)
        now = asyncio.get_running_loop().time()
        try:
            answer = self._calls.feedback.score(TenantId(tenant), request_id, request.score, now)
        except NotFound:
            if request.local_only:
                raise
            with self._asking.held(f"tenant {tenant} for other routers' answers"):
                return await self._elsewhere(request, metadata)
        reference = answer.adapter.reference if answer.adapter is not None else ""
        return inference_pb2.GiveFeedbackResponse(adapter=reference, counted=not answer.is_counted)

    async def _elsewhere(
        self, request: inference_pb2.GiveFeedbackRequest, metadata: Mapping[str, str]
    ) -> inference_pb2.GiveFeedbackResponse:
        asked = inference_pb2.GiveFeedbackRequest(request_id=request.request_id, score=request.score, local_only=True)
        heard = await self._others.ask(_GIVE, asked, metadata)
        for answer in heard.values():
            if isinstance(answer, inference_pb2.GiveFeedbackResponse):
                return answer
        silent = [name for name, e in heard.items() if isinstance(e, RpcError) and e.code is not Code.NOT_FOUND]
        if silent:
            told = f"routers that may remember this request did not answer: {', '.join(silent)}"
            raise ServiceUnavailable(told, retry_after_s=1.0)
        raise NotFound("request_id: no router remembers an answer of this tenant with this id")
