"""The operator's files of token issuers and of adapter sources."""

from __future__ import annotations

import tempfile
from pathlib import Path

from manylora_router.admin.sources import read_rules
from manylora_router.links.token_keys import load_issuers

from tests.fuzz.harness import Harness

_FILE = Path(tempfile.mkdtemp(prefix="manylora-fuzz-")) / "rules.yaml"


def run(data: bytes) -> None:
    """A byte that chooses the file, and its content."""
    _FILE.write_bytes(data[1:])
    if data[:1] == b"i":
        load_issuers(_FILE)
        return
    for rule in read_rules(str(_FILE)):
        if rule.covers("hf://a/b@main"):
            rule.lets("acme", is_operator=False)


HARNESS = Harness(run, documented=(ValueError, OSError))
