"""What a caller writes to name adapters."""

from __future__ import annotations

from manylora_shared.adapter_reference import ReferenceProblem, format_reference, parse_reference

from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    parts = parse_reference(data.decode(errors="surrogateescape"))
    assert parse_reference(format_reference(parts)) == parts


HARNESS = Harness(run, documented=(ReferenceProblem,))
