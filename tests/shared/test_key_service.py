"""The file of key-encryption keys: what it wraps, who may open it, and its rotation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manylora_shared.encryption.key_service import KeyServiceUnavailable, LocalKeys, Wrapped
from manylora_shared.encryption.sealing import Sealed

SECRET = b"s" * 32


def test_a_wrapped_key_opens_for_its_owner_alone(tmp_path: Path) -> None:
    keys = LocalKeys(tmp_path / "keys" / "kek.json")
    wrapped = keys.wrap(SECRET, "acme")
    assert (tmp_path / "keys" / "kek.json").stat().st_mode & 0o777 == 0o600
    assert SECRET not in wrapped.data
    assert LocalKeys(tmp_path / "keys" / "kek.json").unwrap(wrapped, "acme") == SECRET
    for owner, data in (("other", wrapped.data), ("acme", wrapped.data[:-1]), ("acme", b"")):
        with pytest.raises(Sealed):
            keys.unwrap(Wrapped(wrapped.by, data), owner)


def test_a_rotation_leaves_old_keys_until_they_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "kek.json"
    ours, others = LocalKeys(path), LocalKeys(path)
    before = ours.wrap(SECRET, "acme")
    others.rotate()
    after = ours.wrap(SECRET, "acme")  # another process has rotated
    assert before.by != after.by == ours.current()
    assert ours.unwrap(before, "acme") == ours.unwrap(after, "acme") == SECRET
    assert others.forget_others()
    assert others.unwrap(after, "acme") == SECRET
    for keys in (others, LocalKeys(path)):
        with pytest.raises(Sealed, match="which is not in kek"):
            keys.unwrap(before, "acme")


@pytest.mark.parametrize("text", ["", "{}", '{"keys": []}', '{"keys": [{"id": "a", "key": "c2hvcnQ="}]}', "[1]"])
def test_a_file_that_is_none_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kek.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kek\.json") as failed:
        LocalKeys(path)
    assert "c2hvcnQ" not in str(failed.value)


def test_a_file_that_goes_is_an_outage(tmp_path: Path) -> None:
    keys = LocalKeys(tmp_path / "kek.json")
    wrapped = keys.wrap(SECRET, "acme")
    (tmp_path / "kek.json").unlink()
    assert keys.unwrap(wrapped, "acme") == SECRET  # what is known stays
    with pytest.raises(KeyServiceUnavailable):
        keys.wrap(SECRET, "acme")
    with pytest.raises(KeyServiceUnavailable):
        keys.rotate()


def test_the_file_says_which_key_wraps(tmp_path: Path) -> None:
    keys = LocalKeys(tmp_path / "kek.json")
    keys.rotate()
    assert json.loads((tmp_path / "kek.json").read_text())["keys"][0]["id"] == keys.current()
