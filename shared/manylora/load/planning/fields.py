"""Reading a document of settings: each field once, by its path, and none that nobody asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

# What PyYAML raises for text that it cannot read: for dates and escapes that are none ValueError or OverflowError, and
# for a thousand brackets RecursionError.
UNREADABLE_YAML = (yaml.YAMLError, ValueError, OverflowError, RecursionError)


class BadMix(ValueError):
    """The message begins with the field's path."""


class Fields:
    """A mapping under `path`. `end` refuses what was not read."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise BadMix(f"{path or 'the mix'}: must be a mapping, not {shown(value)}")
        self.path = path
        self._left: dict[str, Any] = {str(name): each for name, each in value.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def names(self) -> list[str]:
        return list(self._left)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def text(self, name: str, default: str = "") -> str:
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise BadMix(f"{self.at(name)}: must be text, not {shown(value)}")
        return value

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise BadMix(f"{self.at(name)}: {value!r} is none of {', '.join(choices)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise BadMix(f"{self.at(name)}: must be true or false, not {shown(value)}")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> float:
        value = self.raw(name, default)
        if value is None:
            raise BadMix(f"{self.at(name)}: is missing")
        number = _finite(value)
        if number is None:
            raise BadMix(f"{self.at(name)}: must be a number, not {shown(value)}")
        if above is not None and not number > above:
            raise BadMix(f"{self.at(name)}: must be above {above:g}, not {number:g}")
        if at_least is not None and number < at_least:
            raise BadMix(f"{self.at(name)}: must be at least {at_least:g}, not {number:g}")
        if at_most is not None and number > at_most:
            raise BadMix(f"{self.at(name)}: must be at most {at_most:g}, not {number:g}")
        return number

    def count(self, name: str, default: int | None = None, *, at_least: int = 0, at_most: int | None = None) -> int:
        value = self.number(name, default, at_least=at_least, at_most=at_most)
        if value != int(value):
            raise BadMix(f"{self.at(name)}: must be a whole number, not {value:g}")
        return int(value)

    def end(self) -> None:
        if self._left:
            raise BadMix(f"{self.at(sorted(self._left)[0])}: there is no such field")


def _finite(value: object) -> float | None:
    # None: no number, or one that a float cannot hold.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # of a whole number with hundreds of digits
        return None


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
