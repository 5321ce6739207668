"""A policy's values as they are written down."""

from __future__ import annotations

from dataclasses import dataclass

import yaml
from manylora_shared.policy_text import given, scalar


@dataclass(frozen=True)
class Values:
    share: float = 0.000001
    count: int | None = 3
    is_on: bool = True
    name: str = "007"
    nothing: int | None = None
    none: tuple[str, ...] = ()
    names: tuple[str, ...] = ('O\'Neil "x"', "名", "𠮷野家", "yes")


def test_what_is_written_is_read_again() -> None:
    written = given(Values(), "  ")
    assert "  share: 0.000001" in written
    assert yaml.safe_load("\n".join(["values:", *written]))["values"] == {
        "share": 0.000001,
        "count": 3,
        "is_on": True,
        "name": "007",
        "names": ['O\'Neil "x"', "名", "𠮷野家", "yes"],
    }
    assert scalar(2.50) == "2.5"
