"""The rotation of positions that an upload's header, or an adapter's configuration, asks for."""

from __future__ import annotations

import json

from manylora_shared.errors import InvalidRequest
from manylora_shared.stores.adapter_rope import BaseRope, rope_text

from tests.fuzz.harness import Harness

_BASE = BaseRope({"rope_type": "default", "rope_theta": 10000.0}, original_tokens=2048, longest_tokens=8192)


def run(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    taken = json.loads(rope_text(text))
    try:
        found = _BASE.scaling_of({"rope_scaling": taken})
    except ValueError as error:
        raise InvalidRequest.of("rope_scaling", str(error)) from error
    assert found is None or 0 < found.max_context_tokens <= _BASE.longest_tokens


HARNESS = Harness(run, is_json=True)
