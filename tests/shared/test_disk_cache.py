"""A worker's disk cache: its cap, what is in use, and what a crash leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest, Overloaded
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.disk_cache import DiskCache

UIDS = [AdapterUid(f"{number:064x}") for number in range(4)]


def put(cache: DiskCache, uid: AdapterUid, size_bytes: int = 100) -> None:
    cache.put(uid, {"a": size_bytes}, lambda folder: (folder / "a").write_bytes(b"x" * size_bytes))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 300)
    for age, uid in enumerate(UIDS[:3]):
        put(cache, uid)
        os.utime(tmp_path / "objects" / uid, (age, age))
    with cache.held(UIDS[0]) as folder:
        assert (folder / "a").read_bytes() == b"x" * 100
    put(cache, UIDS[3])
    assert [cache.has(uid) for uid in UIDS] == [True, False, True, True]
    assert cache.used_bytes == 300


def test_what_is_read_stays_and_then_there_may_be_no_room(tmp_path: Path) -> None:
    cache, other = DiskCache(tmp_path, 100), DiskCache(tmp_path, 100)
    put(cache, UIDS[0])
    with other.held(UIDS[0]):
        with pytest.raises(Overloaded, match="no room"):
            put(cache, UIDS[1])
        cache.drop(UIDS[0])
        assert cache.has(UIDS[0])
    put(cache, UIDS[1])
    assert [cache.has(uid) for uid in UIDS[:2]] == [False, True]


def test_nothing_goes_for_what_finds_no_room_anyway(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 300)
    for uid in UIDS[:3]:
        put(cache, uid)
    with pytest.raises(InvalidRequest, match="even empty"):
        put(cache, UIDS[3], 301)
    with cache.held(UIDS[0]), pytest.raises(Overloaded):
        put(cache, UIDS[3], 201)
    assert [cache.has(uid) for uid in UIDS] == [True, True, True, False]
    put(cache, UIDS[3], 300)
    assert [cache.has(uid) for uid in UIDS] == [False, False, False, True]


def test_a_failed_and_a_crashed_write_leave_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 300)

    def fail(folder: Path) -> None:
        (folder / "a").write_bytes(b"x")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        cache.put(UIDS[0], {"a": 100}, fail)
    assert cache.used_bytes == 0
    left = tmp_path / "incoming" / "left"
    left.mkdir()
    (left / "a").write_bytes(b"x" * 100)
    assert DiskCache(tmp_path, 300).used_bytes == 0
    assert not cache.has(UIDS[0])


def test_the_second_of_the_same_bytes_is_dropped(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 300)
    put(cache, UIDS[0])
    put(cache, UIDS[0])
    assert cache.used_bytes == 100


def test_what_cannot_be_put_in_place_is_told_unless_another_has_brought_it(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 300)
    (tmp_path / "objects" / UIDS[0]).write_bytes(b"in the way")
    with pytest.raises(NotADirectoryError):
        put(cache, UIDS[0])

    def beside(folder: Path) -> None:
        (folder / "a").write_bytes(b"x" * 100)
        put(DiskCache(tmp_path, 300), UIDS[1])

    cache.put(UIDS[1], {"a": 100}, beside)
    assert cache.has(UIDS[1])
