"""What a caller writes to name adapters: parts joined by `+`, each NAME[@VERSION][:WEIGHT]. Pure; knows no records."""

from __future__ import annotations

import re
from dataclasses import dataclass

from manylora_shared.ids import MAX_NAME_CHARS, AdapterName, name_problem

MAX_PARTS = 4
MAX_VERSION = (1 << 31) - 1
MAX_WEIGHT = 100.0
MAX_REFERENCE_CHARS = MAX_PARTS * (MAX_NAME_CHARS + 32)
_VERSION = re.compile(r"[1-9][0-9]{0,9}")
_WEIGHT = re.compile(r"-?[0-9]{1,4}(\.[0-9]{1,9})?")


class ReferenceProblem(ValueError):
    """Its text is a field violation's: what of the reference is wrong."""


@dataclass(frozen=True)
class AdapterPart:
    name: AdapterName
    version: int | None = None  # None: the one that the name stands for
    weight: float = 1.0

    def __str__(self) -> str:
        version = f"@{self.version}" if self.version is not None else ""
        weight = f":{self.weight:.9f}".rstrip("0").rstrip(".") if self.weight != 1.0 else ""
        return f"{self.name}{version}{weight}"


def parse_reference(text: str) -> tuple[AdapterPart, ...]:
    """At least one part, no name twice. Raises ReferenceProblem."""
    if len(text) > MAX_REFERENCE_CHARS:
        raise ReferenceProblem(f"has {len(text)} characters, more than {MAX_REFERENCE_CHARS}")
    written = text.split("+")
    if len(written) > MAX_PARTS:
        raise ReferenceProblem(f"names {len(written)} adapters, more than {MAX_PARTS}")
    parts = tuple(_part(each) for each in written)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ReferenceProblem(f"names {name!r} twice; give it one weight")
    return parts


def format_reference(parts: tuple[AdapterPart, ...]) -> str:
    """The canonical text: what `parse_reference` reads back, equal for equal parts."""
    return "+".join(map(str, parts))


def _part(text: str) -> AdapterPart:
    text, has_weight, weight = text.partition(":")
    name, has_version, version = text.partition("@")
    if problem := name_problem(name):
        raise ReferenceProblem(f"{name[:80]!a} {problem}")
    if has_version and not (_VERSION.fullmatch(version) and int(version) <= MAX_VERSION):
        raise ReferenceProblem(f"{name}@{version[:16]!a}: a version is a whole number from 1 to {MAX_VERSION}")
    value = float(weight) if has_weight and _WEIGHT.fullmatch(weight) else 0.0
    if has_weight and not 0.0 < abs(value) <= MAX_WEIGHT:
        raise ReferenceProblem(f"{name}:{weight[:16]!a}: a weight is a decimal number, not 0, from -100 to 100")
    return AdapterPart(AdapterName(name), int(version) if has_version else None, value if has_weight else 1.0)
