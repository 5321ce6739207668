"""A call's headers: key, tenant, class, priority, adapter, idempotency key, traceparent."""

from __future__ import annotations

import json
import re

from manylora.v1 import inference_pb2
from manylora_shared.telemetry.traceparent import trace_id_of

from tests.fuzz.harness import Harness
from tests.fuzz.router import asked

_NAME = re.compile("[0-9a-z_.-]+")


def run(data: bytes) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        return
    given = {name: value for name, value in given.items() if _NAME.fullmatch(name)}  # others reach nobody
    if any("\ud800" <= each <= "\udfff" for value in given.values() for each in value):
        return  # no more does half a character
    assert len(trace_id_of(given.get("traceparent", ""))) in (0, 32)
    asked(inference_pb2.GenerateRequest(text="hi", max_tokens=3), given)


HARNESS = Harness(run, is_json=True)
