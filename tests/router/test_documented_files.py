"""The files that docs/OPERATIONS.md shows are taken as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from manylora_router.admin.sources import read_rules
from manylora_router.guard.tokens import read_issuers

_TEXT = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```yaml\n(.*?)^```", _TEXT, re.DOTALL | re.MULTILINE)


def block_with(text: str) -> str:
    (found,) = (block for block in _BLOCKS if text in block)
    return str(found)


def test_issuers_of_tokens() -> None:
    (issuer,) = read_issuers(yaml.safe_load(block_with("issuers:")))
    assert issuer.classes == {"gold": "interactive", "free": "batch"}


def test_rules_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s")
    monkeypatch.setenv("A_ID", "id")
    monkeypatch.setenv("A_TOKEN", "token")
    (tmp_path / "rules.yaml").write_text(block_with("- prefix:").replace("/run/secrets/a", str(tmp_path / "secret")))
    assert [rule.tenants for rule in read_rules(str(tmp_path / "rules.yaml"))] == [frozenset(["team-a"])] * 2
