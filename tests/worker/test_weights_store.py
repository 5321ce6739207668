"""The worker's side of the adapter store, where it is a folder; a bucket's is tested in shared/test_bucket_files.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid
from manylora_shared.stores.adapter_files import FILE_NAMES
from manylora_worker.weights.store import FolderStore

DIGEST = AdapterDigest("ab" * 32)
UID = adapter_uid(DIGEST, TenantId("acme"))


def test_what_is_lent_is_read_whether_or_not_another_tenant_has_the_same(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert (store.has(UID), store.is_far) == (True, False)
    (tmp_path / "objects" / DIGEST).mkdir(parents=True)
    (tmp_path / "incoming" / "x").mkdir(parents=True)
    with store.held(UID, "incoming/x") as folder:
        assert folder == tmp_path / "incoming" / "x"
    folder.rmdir()
    for lent in ("incoming/x", None):
        with store.held(UID, lent) as folder:
            assert folder == tmp_path / "objects" / DIGEST


@pytest.mark.parametrize(("uid", "forgotten"), [(UID, 2), (adapter_uid(DIGEST, None), 0)])
def test_no_page_of_a_tenants_own_copy_stays_in_memory(
    uid: AdapterUid, forgotten: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tenant that reads the file first waits for the disk, and so learns that it is the first."""
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: told.append(arguments))
    folder = tmp_path / "objects" / DIGEST
    folder.mkdir(parents=True)
    for name in FILE_NAMES:
        (folder / name).touch()
    with FolderStore(tmp_path).held(uid, None):
        assert not told
    assert told == [(0, 0, os.POSIX_FADV_DONTNEED)] * forgotten


def test_nothing_outside_is_lent(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        FolderStore(tmp_path / "store").check_path("../other")
