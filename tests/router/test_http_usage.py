"""GET /v1/usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fakes import Front, http_front


async def _get(front: Front, query: str) -> tuple[int, Any]:
    lines = [f"GET /v1/usage{query} HTTP/1.1", "host: x", f"authorization: Bearer {front.key}", "connection: close"]
    head, _, body = (await front.raw("\r\n".join([*lines, "", ""]).encode())).partition(b"\r\n\r\n")
    return int(head[9:12]), json.loads(body)


async def test_rows_and_sums() -> None:
    async with http_front() as front, front.openai() as client:
        for _ in range(2):
            await client.completions.create(model="upper", prompt="abcd")
        status, told = await _get(front, "")
        assert (status, told["object"], told["after"], told["currency"]) == (200, "list", None, None)
        assert [(row["adapter"], row["prompt_tokens"]) for row in told["data"]] == [("upper", 4)] * 2
        status, told = await _get(front, "?by=adapter&by=class&since=2001-01-01")
        assert [(row["adapter"], row["class"], row["requests"]) for row in told["data"]] == [("upper", "standard", 2)]
        status, told = await _get(front, "?by=total&until=2001-01-01")
        assert told["data"] == []
        status, told = await _get(front, "?limit=1")
        status, rest = await _get(front, f"?limit=1&after={told['after']}")
        assert (len(told["data"]), len(rest["data"]), rest["after"]) == (1, 1, None)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?by=colour", 400, "by"),
        ("?since=soon", 400, "since"),
        ("?limit=many", 400, "limit"),
        ("?colour=red", 400, "colour"),
        ("?" + "by=day&" * 2000, 400, "query"),
        ("?tenant=other", 403, None),
    ],
)
async def test_what_is_asked_wrongly_is_told(query: str, status: int, param: str | None) -> None:
    async with http_front() as front:
        found, told = await _get(front, query)
        assert (found, told["error"]["param"]) == (status, param)
