"""Room for bodies: bounded over all and for each tenant, and given back."""

from __future__ import annotations

import json

import pytest
from manylora_router.front.http import bodies
from manylora_router.front.http.bodies import BodyRoom, cost_of
from manylora_shared.errors import InvalidRequest, Overloaded


def test_a_tenant_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_TENANT_BYTES", 100)
    monkeypatch.setattr(bodies, "MAX_BYTES", 150)
    room = BodyRoom()
    with room.hold("a") as first, room.hold("a") as second, room.hold("b") as other:
        first(60)
        with pytest.raises(Overloaded, match="this tenant's"):
            second(41)
        second(40)
        other(50)
        with pytest.raises(Overloaded, match="too many"):
            other(1)
        assert room.held_bytes == 150
    assert room.held_bytes == 0
    assert not room._held


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1,", b'"k":', b'{"a":[]},'])
def test_a_body_of_nothing_but_values_is_refused_before_it_is_parsed(unit: bytes) -> None:
    """Four megabytes of empty lists stopped every stream of the router for half a second."""
    with pytest.raises(InvalidRequest, match="more than"):
        cost_of(unit * ((4 << 20) // len(unit)))


def test_prompts_of_a_megabyte_are_taken() -> None:
    ids = json.dumps({"prompt": list(range(128_000)), "max_tokens": 5}).encode()
    text = json.dumps({"prompt": "It was, said he: [a] list of {b}.\n" * 30_000}).encode()
    table = json.dumps({"prompt": "0.123,4.56\n" * 90_000}).encode()
    assert 5 * len(ids) < cost_of(ids) < 16 << 20
    for body in (text, table):
        assert len(body) < cost_of(body) < 32 << 20
