"""Room for bodies: bounded over all and for each tenant, and given back."""

from __future__ import annotations

import pytest
from manylora_router.front.http import bodies
from manylora_router.front.http.bodies import BodyRoom
from manylora_shared.errors import Overloaded


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
