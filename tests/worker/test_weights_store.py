"""The worker's side of the adapter store, where it is a folder; a bucket's is tested in shared/test_bucket_files.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterUid
from manylora_worker.weights.store import FolderStore

UID = AdapterUid("ab" * 32)


def test_what_is_lent_is_read_until_the_object_is_there(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert (store.has(UID), store.is_far) == (True, False)
    with store.held(UID, "incoming/x") as folder:
        assert folder == tmp_path / "incoming" / "x"
    (tmp_path / "objects" / UID).mkdir(parents=True)
    with store.held(UID, "incoming/x") as folder:
        assert folder == tmp_path / "objects" / UID


def test_nothing_outside_is_lent(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        FolderStore(tmp_path / "store").check_path("../other")
