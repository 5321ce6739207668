"""How a bucket is reached: credentials are named, never written down, and hidden from logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_shared.stores.access import access_of, read_access


def test_secrets_come_from_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s3cr3t\n")
    monkeypatch.setenv("SOME_KEY_ID", "an-id")
    path = tmp_path / "access.yaml"
    path.write_text(f"region: eu-west-1\naccess_key_id: env:SOME_KEY_ID\nsecret_access_key: file:{tmp_path}/secret\n")
    assert access_of(str(path)) == {"region": "eu-west-1", "access_key_id": "an-id", "secret_access_key": "s3cr3t"}
    assert access_of("") == {}


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({"secret_access_key": "the-secret-itself"}, "never the secret itself"),
        ({"secret_access_key": "env:NOT_THERE_AT_ALL"}, "nothing in"),
        ({"bucket": "x"}, "is not one of"),
        (["region"], "mapping"),
    ],
)
def test_what_is_wrong_is_named_without_the_secret(written: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as failed:
        read_access(written)
    assert "the-secret-itself" not in str(failed.value)
