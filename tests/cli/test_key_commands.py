"""The options of `key`."""

from __future__ import annotations

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_what_a_key_is_to_permit(manylora: Manylora, router: FakeRouter) -> None:
    for never in ("soon", "1000001d", f"{'9' * 400}d", f"{'9' * 5000}s"):
        assert (await manylora("key", "create", "--tenant", "acme", "--expires", never)).exit_code == 2
        assert (await manylora("key", "rotate", "0" * 16, "--overlap", never)).exit_code == 2
    assert (await manylora("key", "create")).exit_code == 2
    assert (await manylora("key", "create", "--scope", "root")).exit_code == 2
    assert (await manylora("key", "create", "--role", "viewer", "--scope", "gateway")).exit_code == 2
    out = await manylora("key", "create", "--role", "viewer")
    assert "for the cluster, with role viewer; it is not shown again" in out.stderr
    made = list(router.keys.values())[-1]
    assert (made.role, list(made.scopes)) == ("viewer", [])
    await manylora("key", "create", "--tenant", "acme", "--requests-per-min", "60", "--tokens-per-min", "9000")
    assert "60 requests/min, 9000 tokens/min" in (await manylora("key", "list")).stdout
    assert "role viewer" in (await manylora("key", "list")).stdout
