"""What may be a name."""

from __future__ import annotations

import re

import pytest
from manylora_shared.ids import NAME_PATTERN, is_valid_name


@pytest.mark.parametrize("name", ["a", "0", "a.b-c_d", "a" * 64, "v1.2"])
def test_names(name: str) -> None:
    assert is_valid_name(name)
    assert re.match(NAME_PATTERN, name)


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a/b", "a b", "a\n", "ä", "a" * 65])
def test_no_names(name: str) -> None:
    assert not is_valid_name(name)


def test_a_name_is_no_way_up_a_path() -> None:
    assert not is_valid_name("a..b")
