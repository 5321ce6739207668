"""What --encryption may say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.encryption.sealing import NoKeys
from manylora_shared.encryption.settings import SealingSettings, key_service_of, opening_keys
from manylora_shared.encryption.vault import VaultKeys
from manylora_shared.process.config import ConfigError

from tests.vault_server import TOKEN, running


def test_nothing_is_sealed_without_it() -> None:
    assert SealingSettings().keyring() is None
    assert isinstance(opening_keys(None), NoKeys)


def test_a_file_of_keys_is_made_where_there_is_none(tmp_path: Path) -> None:
    settings = SealingSettings(encryption=f"local:{tmp_path}/kek.json")
    assert isinstance(settings.keyring(), Keyring)
    assert (tmp_path / "kek.json").exists()


def test_vault_is_reached_with_a_token_by_reference(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    access = tmp_path / "access.yaml"
    access.write_text(f"token: file:{tmp_path}/token\n")
    with running() as server:
        service = key_service_of(f"vault:{server.url}#manylora", str(access))
        assert isinstance(service, VaultKeys)
        assert service.unwrap(service.wrap(b"s" * 32, "acme"), "acme") == b"s" * 32


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"encryption": "local:"}, "must be local:FILE"),
        ({"encryption": "rot13:x"}, "must be local:FILE"),
        ({"encryption": "local:x", "encryption_access": "y"}, "goes with"),
        ({"encryption_access": "y"}, "goes with"),
    ],
)
def test_what_it_may_not_say(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SealingSettings(**settings)


def test_a_key_service_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VAULT_TOKEN", raising=False)
    (tmp_path / "kek.json").write_text("no keys")
    (tmp_path / "access.yaml").write_text("token: the-token-itself\n")
    vault = SealingSettings(encryption="vault:https://vault.example#k")
    for settings, problem in (
        (SealingSettings(encryption=f"local:{tmp_path}/kek.json"), "kek.json"),
        (vault, "VAULT_TOKEN"),
        (dataclasses.replace(vault, encryption_access=f"{tmp_path}/access.yaml"), "never the secret itself"),
    ):
        with pytest.raises(ConfigError, match=problem) as failed:
            settings.keyring()
        assert "the-token-itself" not in str(failed.value)
