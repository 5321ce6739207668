"""Keys as the client makes and rotates them."""

from __future__ import annotations

from manylora.client import Client

from tests.cli.fake_server import FakeRouter


async def test_a_key_is_rotated(router: FakeRouter, address: str) -> None:
    async with Client(address, key="") as client:
        _, info = await client.keys.create(["generate"], tenant="acme", lifetime_s=9.0, networks=["10.0.0.0/8"])
        key, new, replaced = await client.keys.rotate(info.key_id, overlap_s=60.0, lifetime_s=30.0)
    assert (key[:20], new.tenant_id, new.expires_unix_s) == ("mlk-" + "f" * 16, "acme", 30.0)
    assert (replaced.key_id, replaced.expires_unix_s) == (info.key_id, 60.0)
