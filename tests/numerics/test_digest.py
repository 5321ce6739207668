"""Folders that compute the same have one digest; whatever changes an answer changes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from manylora_worker.models import digest
from manylora_worker.models.digest import model_digest

from tests.numerics.conftest import FamilyOf


@pytest.fixture
def folder(family_of: FamilyOf, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family_of("llama").folder, tmp_path / "model"))


def test_every_byte_of_the_weights_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for part_bytes in (1000, 1 << 30):
        monkeypatch.setattr(digest, "_PART_BYTES", part_bytes)
        seen = {model_digest(folder)}
        for position in (len(whole) - 1, len(whole) // 2, len(whole) - 7777):
            file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            seen.add(model_digest(folder))
        assert len(seen) == 4
        file.write_bytes(whole)
        assert model_digest(folder) in seen


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"])
def test_tokens_count(folder: Path, name: str) -> None:
    seen = {model_digest(folder)}
    for content in (b"", b"a", b"b"):
        (folder / name).write_bytes(content)
        seen.add(model_digest(folder))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_of_the_configuration_what_has_an_effect(folder: Path, name: str) -> None:
    before = model_digest(folder)
    config = json.loads((folder / name).read_text())
    told = {"transformers_version": "9", "_name_or_path": "elsewhere"}
    (folder / name).write_text(json.dumps(dict(reversed((config | told).items())), indent=8))
    assert model_digest(folder) == before
    (folder / name).write_text(json.dumps(config | {"eos_token_id": 7}))
    assert model_digest(folder) != before


def test_files_that_are_not_of_the_model_do_not_count(folder: Path) -> None:
    before, files = model_digest(folder), sorted(folder.iterdir())
    assert sorted(folder.iterdir()) == files
    (folder / "README.md").write_text("words")
    (folder / "consolidated.safetensors").write_bytes(b"of another loader")
    assert model_digest(folder) == before
