"""Names of spans and attributes."""

from __future__ import annotations

from manylora_shared.telemetry import Attribute, SpanName


def test_names_are_unique() -> None:
    for names in (SpanName, Attribute):
        values = [value for name, value in vars(names).items() if not name.startswith("_")]
        assert len(values) == len(set(values))
