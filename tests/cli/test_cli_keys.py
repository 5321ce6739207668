"""`key`, and the key that commands present."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora.client.credentials import remove_note, write_note

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_keys(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("key", "create", "--tenant", "acme", "--name", "ci")
    key = "mlk-0000000000000000-" + "5" * 64
    assert (out.exit_code, out.stdout) == (0, key + "\n")
    assert key not in out.stderr
    assert list(router.keys["0" * 16].scopes) == ["generate"]
    out = await manylora("key", "create", "--scope", "gateway", "--scope", "operator", "--json")
    assert (out.json["key"][:20], out.json["scopes"]) == ("mlk-0000000000000001", ["gateway", "operator"])
    out = await manylora("key", "list")
    assert "acme" in out.stdout
    assert "5" * 64 not in out.stdout
    out = await manylora("key", "revoke", "0" * 16)
    assert (out.exit_code, out.stdout) == (0, f"{'0' * 16}: revoked\n")
    out = await manylora("key", "list", "--tenant", "acme", "--json")
    assert [(k["key_id"], k["revoked_unix_s"]) for k in out.json["keys"]] == [("0" * 16, 2.0)]
    out = await manylora("key", "revoke", "nosuch", "--json")
    assert (out.exit_code, out.json["error"]["code"]) == (1, "NOT_FOUND")
    out = await manylora("key", "rotate", "0" * 16, "--overlap", "2h", "--expires", "90d", "--json")
    assert (out.json["expires_unix_s"], out.json["replaced"]["expires_unix_s"]) == (90 * 86400, 7200)
    out = await manylora("key", "rotate", "0" * 16)
    assert out.stdout == f"mlk-{'f' * 16}-{'5' * 64}\n"
    assert f"takes the place of {'0' * 16}, which ends 1970-01-02" in out.stderr


async def test_the_key_that_is_presented(
    manylora: Manylora, router: FakeRouter, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MANYLORA_KEY", raising=False)

    async def presented(*more: str) -> str | None:
        out = await manylora("generate", "one", *more)
        assert out.exit_code == 0, out.stderr
        return router.metadata[-1].get("authorization")

    assert await presented() is None
    key_file = tmp_path / "operator.key"
    key_file.write_text("mlk-of-the-cluster\n")
    write_note(address, key_file)
    assert await presented() == "Bearer mlk-of-the-cluster"
    monkeypatch.setenv("MANYLORA_KEY", "mlk-of-the-environment")
    assert await presented() == "Bearer mlk-of-the-environment"
    assert await presented("--key", "mlk-of-the-flag") == "Bearer mlk-of-the-flag"
    monkeypatch.delenv("MANYLORA_KEY")
    remove_note(address, tmp_path / "another.key")
    assert await presented() == "Bearer mlk-of-the-cluster"
    remove_note(address, key_file)
    assert await presented() is None
    out = await manylora("generate", "one", "--key", "ä")
    assert out.exit_code == 1
    assert "authorization" in out.stderr
    assert "ä" not in out.stderr
