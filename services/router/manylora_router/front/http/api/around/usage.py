"""GET /v1/usage: AdminService's GetUsage, by the query's fields."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from manylora.v1 import usage_pb2
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.usage import moment, told_of

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.api.around.adapters import admin_call
from manylora_router.front.http.exchange import Exchange

FIELDS = ("tenant", "by", "since", "until", "after", "limit")
_MAX_QUERY = 4_096


async def usage(exchange: Exchange, door: Door) -> None:
    caller = asked.caller_of(exchange.headers)
    given = _fields(exchange.query)
    by = [name for name in given.get("by", "").split(",") if name and name != "total"]
    limit = given.get("limit", "0")
    if not (limit.isascii() and limit.isdigit()):
        raise InvalidRequest.of("limit", "must be a whole number")
    request = usage_pb2.GetUsageRequest(
        tenant_id=given.get("tenant", caller.tenant),
        by=by,
        total=given.get("by") == "total",
        since_unix_s=moment(given["since"], "since") if "since" in given else 0.0,
        until_unix_s=moment(given["until"], "until") if "until" in given else 0.0,
        after=given.get("after", ""),
        limit=min(int(limit[:9]), 2**31),
    )
    told: usage_pb2.GetUsageResponse = await door.admin["GetUsage"](request, admin_call(exchange, caller))
    is_sum = bool(by) or request.total
    document: dict[str, Any] = {
        "object": "list",
        "data": [told_of(row, by if is_sum else None) for row in told.rows],
        "after": told.after or None,
        "currency": told.currency or None,
    }
    await exchange.answer(document)


def _fields(query: bytes) -> dict[str, str]:
    """Raises InvalidRequest."""
    if len(query) > _MAX_QUERY:
        raise InvalidRequest.of("query", f"has more than {_MAX_QUERY} bytes")
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidRequest.of("query", "is malformed") from None
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in FIELDS:
            raise InvalidRequest.of(name[:40], f"is none of {', '.join(FIELDS)}")
        given[name] = f"{given[name]},{value}" if name == "by" and name in given else value
    return given
