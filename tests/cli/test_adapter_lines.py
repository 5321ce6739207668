"""Versions of adapters through the Python client."""

from __future__ import annotations

from manylora.client import Client

from tests.cli.fake_server import FakeRouter


async def test_each_call_returns_the_line_as_it_is_after_it(address: str, router: FakeRouter) -> None:
    async with Client(address, tenant="acme") as client:
        lines = [
            await client.adapters.rollout("acme", "up", to=2, percent=10, sticky="user"),
            await client.adapters.promote("acme", "up"),
            await client.adapters.rollback("acme", "up"),
            await client.adapters.retire("acme", "up", 3),
            await client.adapters.history("acme", "up"),
        ]
    assert len(router.line_changes) == 5
    for line in lines:
        assert [(v.number, bool(v.retired_unix_s)) for v in line.versions] == [(1, False), (2, False), (3, True)]
        assert line.rollout is not None
        assert (line.in_force, line.rollout.to, line.events[0].percent) == (1, 2, 10)
