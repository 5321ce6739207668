"""What a call's headers ask for beyond its connection: work that is done once, an answer that waits, missing events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from manylora_shared.errors import InvalidRequest
from manylora_shared.metadata import IDEMPOTENCY_KEY, KEEP_KEY, LAST_EVENT_ID

from manylora_router.front.http.exchange import EventIds, Exchange
from manylora_router.front.kept_answers import KEY_KEEP_S, KeptAnswers
from manylora_router.guard.admission import MAX_KEEP_S, RequestInput


async def name(exchange: Exchange, kept: KeptAnswers) -> None:
    """Gives the call the id of the answer that it is for, at whichever router. Raises InvalidRequest, or as
    `KeptAnswers.id_of`."""
    headers = exchange.headers
    if LAST_EVENT_ID in headers:
        exchange.request_id, _ = _last_event(headers)
    elif (key := headers.get(IDEMPOTENCY_KEY)) and (found := await kept.id_of(exchange.tenant, key)):
        exchange.request_id, exchange.joins = found, True


def asked(exchange: Exchange, requests: Sequence[RequestInput], *, is_stream: bool) -> list[RequestInput]:
    """The call's requests, with what its headers ask for. Raises InvalidRequest."""
    headers = exchange.headers
    keep_s = _keep_s(headers)
    has_key, is_again = IDEMPOTENCY_KEY in headers, LAST_EVENT_ID in headers
    if not (keep_s or has_key or is_again):
        return list(requests)
    if (keep_s or is_again) and len(requests) > 1:
        raise InvalidRequest.of(LAST_EVENT_ID if is_again else KEEP_KEY, "is for a call with one prompt")
    if ((keep_s and not has_key) or is_again) and not is_stream:
        raise InvalidRequest.of(LAST_EVENT_ID if is_again else KEEP_KEY, "is for streams")
    if is_stream and len(requests) == 1:
        exchange.event_ids = EventIds(exchange.request_id, _last_event(headers)[1] if is_again else 0)
    keep_s = keep_s or (KEY_KEEP_S if is_again else 0)
    fingerprint = exchange.fingerprint()
    return [
        replace(
            request,
            fingerprint=fingerprint,
            keep_s=keep_s,
            part=part,
            is_again=is_again,
            joins=exchange.joins and bool(request.request_id),
        )
        for part, request in enumerate(requests)
    ]


def _keep_s(headers: Mapping[str, str]) -> int:
    given = headers.get(KEEP_KEY, "")
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= 3 and 1 <= int(given) <= MAX_KEEP_S):
        raise InvalidRequest.of(KEEP_KEY, f"must be a whole number of seconds from 1 to {MAX_KEEP_S}")
    return int(given)


def _last_event(headers: Mapping[str, str]) -> tuple[str, int]:
    request_id, _, number = headers[LAST_EVENT_ID].partition("-")
    if not (request_id and number.isascii() and number.isdigit() and len(number) <= 9):
        raise InvalidRequest.of(LAST_EVENT_ID, "is not the id of an event of this API")
    return request_id, int(number)
