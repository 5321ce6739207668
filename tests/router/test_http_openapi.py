"""The OpenAPI document names every route, and is served."""

from __future__ import annotations

import json
from typing import Any

from http_fakes import http_front
from manylora_router.front.http import openapi, routes
from manylora_router.front.http.console import files
from openapi_spec_validator import validate

DOCUMENT: Any = openapi.document()


def test_the_document_is_sound_and_names_every_route() -> None:
    validate(DOCUMENT)
    named = [name.split() for name in routes.names() if "/console" not in name]  # the console's answers may change
    served = {("/v1/models/{id}" if path == routes._MODEL else path, method.lower()) for method, path in named}
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    open_ = {path for path, methods in DOCUMENT["paths"].items() if "security" not in next(iter(methods.values()))}
    assert open_ == {path for path in routes._OPEN if path != files.PREFIX}


async def test_it_is_served_without_a_key() -> None:
    async with http_front() as front:
        answer = await front.raw(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == DOCUMENT
