"""Vault's transit engine as the key service, and secrets of its key-value engine, against a fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manylora_shared.encryption.key_service import KeyServiceUnavailable
from manylora_shared.encryption.sealing import Sealed
from manylora_shared.encryption.vault import Vault, VaultKeys
from manylora_shared.stores.access import secret_of

from tests.vault_server import TOKEN, VaultServer, running

SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[VaultServer]:
    with running() as server:
        yield server


def keys_of(server: VaultServer, token: str = TOKEN) -> VaultKeys:
    return VaultKeys(Vault(server.url, lambda: token), "manylora")


def test_data_keys_are_wrapped_by_vault(server: VaultServer) -> None:
    keys = keys_of(server)
    wrapped = keys.wrap(SECRET, "acme")
    assert wrapped.by == keys.current() == "manylora:v1"
    assert keys.unwrap(wrapped, "acme") == SECRET
    with pytest.raises(Sealed):
        keys.unwrap(wrapped, "other")
    keys.rotate()
    after = keys.wrap(SECRET, "acme")
    assert after.by == keys.current() == "manylora:v2"
    assert keys.unwrap(wrapped, "acme") == SECRET
    assert keys.forget_others()
    assert keys.unwrap(after, "acme") == SECRET
    with pytest.raises(Sealed):
        keys.unwrap(wrapped, "acme")


def test_an_outage_or_a_refusal_says_nothing_of_the_token(server: VaultServer) -> None:
    server.is_sealed = True
    with pytest.raises(KeyServiceUnavailable, match="503"):
        keys_of(server).wrap(SECRET, "acme")
    server.is_sealed = False
    with pytest.raises(KeyServiceUnavailable, match="403") as failed:
        keys_of(server, "a-wrong-token").wrap(SECRET, "acme")
    assert "a-wrong-token" not in str(failed.value)
    with pytest.raises(KeyServiceUnavailable, match="does not answer"):
        VaultKeys(Vault("http://127.0.0.1:9", lambda: TOKEN), "manylora").wrap(SECRET, "acme")


@pytest.mark.parametrize(("url", "name"), [("vault.example", "manylora"), ("https://vault.example", "a/b")])
def test_what_names_no_key_is_refused(url: str, name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        VaultKeys(Vault(url, lambda: TOKEN), name)


def test_secrets_are_read_from_vault(server: VaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.secrets["bucket"] = {"key": "s3cr3t"}
    monkeypatch.setenv("VAULT_ADDR", server.url)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    assert secret_of("vault:secret/data/bucket#key", "secret_access_key") == "s3cr3t"
    for reference, problem in (("vault:secret/data/bucket#other", "nothing"), ("vault:secret/data/none#key", "404")):
        with pytest.raises(ValueError, match=problem):
            secret_of(reference, "secret_access_key")
    monkeypatch.setenv("VAULT_ADDR", "")
    with pytest.raises(ValueError, match="VAULT_ADDR"):
        secret_of("vault:secret/data/bucket#key", "secret_access_key")
