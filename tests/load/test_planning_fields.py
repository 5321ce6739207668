from __future__ import annotations

import pytest
from manylora.load.planning.fields import BadMix, Fields


def test_each_field_is_read_once_and_the_rest_is_refused() -> None:
    fields = Fields({"rate": 3, "on": True, "left": 1}, "a.b")
    assert fields.number("rate", above=0) == 3
    assert fields.flag("on", default=False)
    with pytest.raises(BadMix, match=r"^a\.b\.left: there is no such field"):
        fields.end()


@pytest.mark.parametrize("value", [True, "3", float("inf"), [1]])
def test_what_is_no_number_is_refused_and_shown_short(value: object) -> None:
    with pytest.raises(BadMix, match=r"^x\.n: must be a number, not"):
        Fields({"n": value}, "x").number("n")
    with pytest.raises(BadMix) as caught:
        Fields({"n": "y" * 1000}).text("m", "") or Fields({"n": "y" * 1000}).number("n")
    assert len(str(caught.value)) < 120
