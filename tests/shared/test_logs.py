from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from manylora_shared.telemetry.logs import fields, setup

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    setup("worker", "info", instance_id="w0", stream=stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_fields_and_trace(stream: io.StringIO) -> None:
    log = logging.getLogger("manylora_worker.hosting.runtime")
    log.debug("not shown")
    log.info("loaded %d\nlayers", 3, extra=fields(traceparent=PARENT, tenant="acme", blocks=4, adapter="", worker=None))
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "service": "worker",
        "instance": "w0",
        "logger": "manylora_worker.hosting.runtime",
        "message": "loaded 3\nlayers",
        "tenant": "acme",
        "blocks": 4,
        "trace_id": PARENT.split("-")[1],
        "span_id": PARENT.split("-")[2],
    }


def test_exceptions_are_on_the_same_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logging.getLogger("x").exception("failed", extra=fields(message="cannot replace", path=object))
    (line,) = lines(stream)
    assert line["message"] == "failed"
    assert "what went wrong" in line["exception"]


@pytest.mark.parametrize("name", ["prompt", "text", "token_ids", "authorization"])
def test_content_is_never_a_field(name: str) -> None:
    with pytest.raises(AssertionError, match="never logged"):
        fields(**{name: "x"})


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-level: 'loud' is not one of"):
        setup("worker", "loud")
