"""An etcd that is not there, and one that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_shared.coordination.binary import EtcdFailed, EtcdNotFound, find_etcd, free_port, start_etcd

pytestmark = pytest.mark.e2e  # each starts an etcd of its own, and kills it


async def test_a_missing_binary_and_a_failing_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(EtcdFailed, match="not a directory"):
        await start_etcd(tmp_path, client_port=free_port())
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_etcd().name == "etcd"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtcdNotFound, match="etcd-server"):
        find_etcd()
