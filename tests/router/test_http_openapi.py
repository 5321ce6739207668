"""The OpenAPI document names every route, and is served."""

from __future__ import annotations

import json
from typing import Any

from http_fakes import http_front
from manylora_router.front.http import openapi, routes
from openapi_spec_validator import validate

DOCUMENT: Any = openapi.document()


def test_the_document_is_sound_and_names_every_route() -> None:
    validate(DOCUMENT)
    tables = (routes._OPEN, routes._GUARDED, routes._ADMIN, routes._OPERATORS)
    served = {
        ("/v1/models/{id}" if path == routes._MODEL else path, method.lower())
        for table in tables
        for path, methods in table.items()
        for method in methods
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    open_ = {path for path, methods in DOCUMENT["paths"].items() if "security" not in next(iter(methods.values()))}
    assert open_ == set(routes._OPEN)


async def test_it_is_served_without_a_key() -> None:
    async with http_front() as front:
        answer = await front.raw(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == DOCUMENT
