"""The key of the audit log, in its file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from manylora_shared.audit.signing import signer_of


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "audit.key"
    made = signer_of(path, random.Random(1).getrandbits)
    assert path.stat().st_mode & 0o077 == 0
    assert signer_of(path, random.Random(2).getrandbits).public_key == made.public_key
    assert (tmp_path / "keys" / "audit.key.pub").read_text() == made.public_key + "\n"
    assert made.public_key not in path.read_text()
    given = tmp_path / "given" / "audit.key"
    given.parent.mkdir()
    given.write_text(path.read_text())
    given.chmod(0o440)  # as a secret that is mounted
    assert signer_of(given, random.Random(2).getrandbits).public_key == made.public_key
    assert [file.name for file in given.parent.iterdir()] == ["audit.key"]


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.key"
    path.write_text("x\n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="holds no key of the audit log"):
        signer_of(path, random.Random(1).getrandbits)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="its mode must be 0600 or 0640"):
        signer_of(path, random.Random(1).getrandbits)
