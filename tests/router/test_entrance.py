"""A handler is asked only by whom the rules let in, and hears who it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_router.links.entrance import Entrance, KnownCall
from manylora_shared.errors import PermissionDenied
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import Role

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@dataclass
class Call:
    metadata: Mapping[str, str] = field(default_factory=lambda: {"authorization": "Bearer x"})
    peer: str = "ipv4:10.0.0.1:80"

    def time_remaining(self) -> float | None:
        return 3.0


class Callers:
    def __init__(self, role: Role) -> None:
        self.principal = Principal("k", TenantId("acme"), (), role=role)
        self.asked: list[tuple[str, str]] = []

    def known(self, authorization: str, peer: str) -> Principal:
        self.asked.append((authorization, peer))
        return self.principal


async def test_who_is_let_in() -> None:
    heard: list[KnownCall] = []

    async def list_keys(request: Any, call: KnownCall) -> Any:
        heard.append(call)
        return admin_pb2.ListKeysResponse()

    def read(request: Any, call: KnownCall) -> AsyncIterator[Any]:
        heard.append(call)
        return SimpleNamespace()  # type: ignore[return-value]

    for role, is_let_in in ((Role.TENANT_ADMIN, True), (Role.GENERATE, False)):
        callers = Callers(role)
        handlers = Entrance(callers).guarded(ADMIN, {"ListKeys": list_keys, "ReadAdapter": read})  # type: ignore[arg-type]
        heard.clear()
        if is_let_in:
            await handlers["ListKeys"](None, Call())
            handlers["ReadAdapter"](None, Call())
            assert [call.principal for call in heard] == [callers.principal] * 2
            assert (heard[0].peer, heard[0].time_remaining()) == ("ipv4:10.0.0.1:80", 3.0)
            assert heard[0].metadata == {"authorization": "Bearer x"}
        else:
            with pytest.raises(PermissionDenied):
                await handlers["ListKeys"](None, Call())
            with pytest.raises(PermissionDenied):
                handlers["ReadAdapter"](None, Call())
            assert heard == []
        assert callers.asked == [("Bearer x", "ipv4:10.0.0.1:80")] * 2
