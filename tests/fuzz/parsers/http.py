"""An HTTP request to any of the router's routes: path, headers, body."""

from __future__ import annotations

import json

from tests.fuzz.harness import Harness
from tests.fuzz.router import posted


def run(data: bytes) -> None:
    """{"path": "...", "headers": {...}, "body": any document, or the body's text}"""
    try:
        given = json.loads(data)
        path, headers, body = str(given["path"]), dict(given["headers"]), given["body"]
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    posted(path, raw, (body if isinstance(body, str) else json.dumps(body)).encode("utf-8", "surrogatepass"))


HARNESS = Harness(run, is_json=True)
