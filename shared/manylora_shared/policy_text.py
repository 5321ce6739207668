"""Texts in policies: how values are written down again, so that reading gives the same, and names to scrub. Pure."""

from __future__ import annotations

import json

MAX_SCRUB_NAMES = 256
_MIN_CHARS, _MAX_CHARS = 2, 128
SCRUB_NAME_RULE = f"must be a text of {_MIN_CHARS} to {_MAX_CHARS} printable characters"

Value = bool | int | float | str | tuple[str, ...]


def given(values: object, indent: str) -> list[str]:
    """A dataclass's fields, a line each, but for those that say nothing: None and ()."""
    return [f"{indent}{name}: {scalar(value)}" for name, value in vars(values).items() if value not in (None, ())]


def scalar(value: Value) -> str:
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)  # as \ud842\udfb7 a character is none to YAML
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):  # never as 1e-06
        return f"{value:.6f}".rstrip("0").rstrip(".")
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_scrub_name(text: str) -> bool:
    """Of a tenant's list of what is taken out of kept texts."""
    return _MIN_CHARS <= len(text) <= _MAX_CHARS and text.isprintable() and text == text.strip()
