"""The adapter store: nothing outside its root is read or written, and nothing is half there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterDigest
from manylora_shared.stores import adapter_files
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    MAX_CHUNK_BYTES,
    WEIGHTS_NAME,
    AdapterFiles,
    LocalAdapterFiles,
    adapter_digest,
    parse_config,
)
from manylora_sim.adapter_files import MemoryAdapterFiles

from tests.frozen_heap import frozen_heap

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
WEIGHTS = b"safetensors" * 100


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterFiles:
    if request.param == "local":
        return LocalAdapterFiles(tmp_path, max_weights_bytes=3 << 20)
    return MemoryAdapterFiles(max_weights_bytes=3 << 20)


async def written(files: AdapterFiles, config: bytes = json.dumps(CONFIG).encode(), weights: bytes = WEIGHTS) -> str:
    incoming = await files.begin()
    await files.append(incoming, CONFIG_NAME, config)
    for start in range(0, len(weights), 300):
        await files.append(incoming, WEIGHTS_NAME, weights[start : start + 300])
    return incoming


def expected_uid() -> str:
    canonical = json.dumps(CONFIG, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(
        b"manylora-adapter-v1\0" + len(canonical).to_bytes(8, "big") + canonical + WEIGHTS
    ).hexdigest()


async def test_uid_is_of_the_content_alone(files: AdapterFiles) -> None:
    one = await files.finish(await written(files))
    other = await files.finish(await written(files, json.dumps(CONFIG, indent=3).encode()))
    assert one == other == expected_uid()
    assert await files.finish(await written(files, weights=WEIGHTS + b"!")) != one


async def test_commit_makes_an_object_and_may_come_twice(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    for _ in range(2):
        incoming = await written(files)
        uid = await files.finish(incoming)
        await files.commit(incoming, uid)
        await files.discard(incoming)
        assert sorted(p.name for p in (tmp_path / "objects" / uid).iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
        assert list((tmp_path / "incoming").iterdir()) == []
    assert adapter_digest(CONFIG, tmp_path / "objects" / uid / WEIGHTS_NAME) == uid == expected_uid()


async def test_commits_of_the_same_bytes_at_once(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    incoming = [await written(files) for _ in range(8)]
    uids = [await files.finish(i) for i in incoming]
    await asyncio.gather(*(files.commit(i, u) for i, u in zip(incoming, uids, strict=True)))
    assert [p.name for p in (tmp_path / "objects").iterdir()] == [expected_uid()]
    assert list((tmp_path / "incoming").iterdir()) == []


def truncated(target: Path) -> None:
    os.chmod(target / WEIGHTS_NAME, 0o644)
    (target / WEIGHTS_NAME).write_bytes(WEIGHTS[:-1])


def one_bit(target: Path) -> None:
    os.chmod(target / WEIGHTS_NAME, 0o644)
    (target / WEIGHTS_NAME).write_bytes(bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:])


def other_settings(target: Path) -> None:
    os.chmod(target / CONFIG_NAME, 0o644)
    (target / CONFIG_NAME).write_text(json.dumps({**CONFIG, "r": 9}))


def no_settings(target: Path) -> None:
    (target / CONFIG_NAME).unlink()


def no_json(target: Path) -> None:
    os.chmod(target / CONFIG_NAME, 0o644)
    (target / CONFIG_NAME).write_bytes(b"\0" * 64)


def weights_as_a_folder(target: Path) -> None:
    (target / WEIGHTS_NAME).unlink()
    (target / WEIGHTS_NAME).mkdir()


def weights_by_a_link(target: Path) -> None:
    (target / WEIGHTS_NAME).rename(target.parent / "elsewhere")
    (target / WEIGHTS_NAME).symlink_to(target.parent / "elsewhere")


def a_file_in_its_place(target: Path) -> None:
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    target.write_bytes(b"")


DAMAGES = [
    truncated, one_bit, other_settings, no_settings, no_json,
    weights_as_a_folder, weights_by_a_link, a_file_in_its_place,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
async def test_the_same_bytes_again_heal_a_damaged_object(damage: Callable[[Path], None], tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    uid = await committed(files, WEIGHTS)
    target = tmp_path / "objects" / uid
    damage(target)
    incoming = [await written(files) for _ in range(4)]
    for path in incoming:
        await files.finish(path)
    await asyncio.gather(*(files.commit(path, uid) for path in incoming))
    assert adapter_digest(json.loads((target / CONFIG_NAME).read_bytes()), target / WEIGHTS_NAME) == uid
    assert not any(path.is_symlink() for path in target.iterdir())
    assert list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
async def test_damage_is_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    uid = await committed(files, WEIGHTS)
    assert await files.problem(uid) == ""
    damage(tmp_path / "objects" / uid)
    problem = await files.problem(uid)
    assert any(name in problem for name in (CONFIG_NAME, WEIGHTS_NAME, uid)), problem


async def test_what_is_gone_is_named(files: AdapterFiles) -> None:
    assert await files.problem(AdapterDigest("0" * 64)) != ""


async def test_a_check_that_nobody_waits_for_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalAdapterFiles(tmp_path)
    uid = await committed(files, bytes(1 << 20))
    monkeypatch.setattr(adapter_files, "_COPY_BYTES", 1)  # it would take half a second and more
    task = asyncio.create_task(files.problem(uid))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    began_s = time.monotonic()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began_s < 0.2


async def test_a_commit_reads_as_much_whether_or_not_the_object_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would tell a tenant that another has the same adapter."""
    files = LocalAdapterFiles(tmp_path)
    hashed: list[Path] = []
    synced: list[int] = []
    digest_of, sync = LocalAdapterFiles._digest, os.fsync
    monkeypatch.setattr(
        LocalAdapterFiles,
        "_digest",
        lambda self, folder, is_left=None: hashed.append(folder) or digest_of(self, folder, is_left),
    )
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or sync(descriptor))
    counts = []
    for _ in range(2):
        incoming = await written(files)
        digest = await files.finish(incoming)
        hashed.clear()
        synced.clear()
        await files.commit(incoming, digest)
        counts.append((len(hashed), len(synced)))
    assert counts == [(1, 1), (1, 1)]


async def test_what_is_read_otherwise_than_it_was_written_is_no_object(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    incoming = await written(files)
    digest = await files.finish(incoming)
    one_bit(tmp_path / incoming)
    with pytest.raises(OSError, match="what was written"):
        await files.commit(incoming, digest)
    assert not list((tmp_path / "objects").iterdir())


async def test_a_sound_object_is_not_replaced(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    uid = await committed(files, WEIGHTS)
    before = (tmp_path / "objects" / uid / WEIGHTS_NAME).stat().st_ino
    await committed(files, WEIGHTS)
    assert (tmp_path / "objects" / uid / WEIGHTS_NAME).stat().st_ino == before


@pytest.mark.parametrize(
    ("name", "data", "field"),
    [
        ("adapter_model.bin", b"x", "chunk.file_name"),
        ("../escape", b"x", "chunk.file_name"),
        ("/etc/passwd", b"x", "chunk.file_name"),
        ("", b"x", "chunk.file_name"),
        (WEIGHTS_NAME + "\0", b"x", "chunk.file_name"),
        (WEIGHTS_NAME, b"x" * (MAX_CHUNK_BYTES + 1), "chunk.data"),
    ],
)
async def test_bad_chunks(files: AdapterFiles, name: str, data: bytes, field: str) -> None:
    incoming = await files.begin()
    with pytest.raises(InvalidRequest) as error:
        await files.append(incoming, name, data)
    assert [v.field for v in error.value.violations] == [field]


async def test_files_have_their_largest_size(files: AdapterFiles) -> None:
    incoming = await files.begin()
    for _ in range(3):
        await files.append(incoming, WEIGHTS_NAME, b"x" * MAX_CHUNK_BYTES)
    with pytest.raises(InvalidRequest, match=WEIGHTS_NAME):
        await files.append(incoming, WEIGHTS_NAME, b"x")
    await files.append(incoming, CONFIG_NAME, b"x" * MAX_CHUNK_BYTES)
    with pytest.raises(InvalidRequest, match=CONFIG_NAME):
        await files.append(incoming, CONFIG_NAME, b"x")


async def test_missing_files_are_named(files: AdapterFiles) -> None:
    with pytest.raises(InvalidRequest) as error:
        await files.finish(await files.begin())
    assert [v.field for v in error.value.violations] == [CONFIG_NAME, WEIGHTS_NAME]


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"{",
        b"[]",
        b'{"r": NaN}',
        b'{"r": 1, "r": 2}',
        b'{"x": {"r": 1, "r": 2}}',
        b'{"r": 1e999}',
        b'{"r": -1e999}',
        b'{"r": ' + b"9" * 41 + b"}",
        b'{"r": ' + b"[" * 32 + b"]" * 32 + b"}",
        b'{"r": ' * 33 + b"1" + b"}" * 33,
        b"[" * 100_000,
        b'{"r": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b" " * (1 << 20) + b"{}",
    ],
)
def test_configurations_that_are_not_json(config: bytes) -> None:
    with pytest.raises(InvalidRequest, match=CONFIG_NAME):
        parse_config(config)


def test_depth_at_its_limit() -> None:
    assert parse_config(b'{"r": ' + b"[" * 31 + b"]" * 31 + b"}")


def keys(number: int, last: str = "") -> bytes:
    return b"{" + b",".join(b'"%x":0' % index for index in range(number)) + last.encode() + b"}"


def parsing_s(config: bytes) -> float:
    with frozen_heap(), suppress(InvalidRequest):
        before_s = time.thread_time()
        try:
            parse_config(config)
        finally:
            taken_s = time.thread_time() - before_s
    return taken_s


@pytest.mark.parametrize(
    "config",
    [
        keys(40_000),
        keys(40_000, ',"9c3f":1'),
        b'{"r":[' + b",".join(b"{%s}" % b'"a":0' for _ in range(40_000)) + b"]}",
        b'{"r":[' + b"0," * 160_000 + b"0]}",
        b'{"r":[' + b"[]," * 100_000 + b"0]}",
        b'{"r":[' + b"[]," * 340_000 + b"0]}",
        b'{"r":"' + rb"\u0000" * 170_000 + b'"}',
    ],
    ids=["keys", "a key twice at the end", "objects", "numbers", "lists", "1 MB of lists", "escapes"],
)
def test_a_large_configuration_costs_little(config: bytes) -> None:
    assert len(config) > 290_000
    assert parsing_s(config) < 0.1


@pytest.mark.parametrize("config", [keys(16_383), keys(16_382, ',"1":1'), b'{"r":[' + b"[]," * 8_190 + b"0]}"])
def test_as_many_values_as_may_be_cost_little(config: bytes) -> None:
    assert parsing_s(config) < 0.1
    with pytest.raises(InvalidRequest, match="more than 16384"):
        parse_config(config.replace(b"{", b'{"r":[[],[]],', 1))


def lay(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text(json.dumps(CONFIG))
    (folder / WEIGHTS_NAME).write_bytes(WEIGHTS)
    return folder


async def test_import_copies(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    source = lay(tmp_path / "imports" / "one")
    (source / "README.md").write_text("not taken")
    for path in ("imports/one", "imports/./one", "imports//one/"):
        incoming = await files.begin()
        await files.import_from(incoming, path)
        assert await files.finish(incoming) == expected_uid()
        assert sorted(p.name for p in (tmp_path / incoming).iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]


async def test_an_import_tells_what_it_brings_of_a_tokenizer(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    source = lay(tmp_path / "imports" / "one")
    (source / "chat_template.jinja").write_text("{{ x }}")
    brought = await files.import_from(await files.begin(), "imports/one")
    assert brought.chat_template == "{{ x }}"
    (source / "added_tokens.json").symlink_to(source / CONFIG_NAME)
    with pytest.raises(InvalidRequest, match="symbolic link"):
        await files.import_from(await files.begin(), "imports/one")


Build = Callable[[Path, Path], str]


def absolute(root: Path, outside: Path) -> str:
    return str(lay(outside / "a"))


def dot_dot(root: Path, outside: Path) -> str:
    lay(outside / "a")
    return "../outside/a"


def inner_dot_dot(root: Path, outside: Path) -> str:
    lay(root / "x" / "a")
    return "x/../x/a"


def linked_folder(root: Path, outside: Path) -> str:
    (root / "link").symlink_to(lay(outside / "a"))
    return "link"


def linked_parent(root: Path, outside: Path) -> str:
    lay(outside / "a")
    (root / "link").symlink_to(outside)
    return "link/a"


def link_inside(root: Path, outside: Path) -> str:
    (root / "link").symlink_to(lay(root / "x"))
    return "link"


def the_root(root: Path, outside: Path) -> str:
    return "."


def nul(root: Path, outside: Path) -> str:
    lay(root / "x")
    return "x\0y"


def absent(root: Path, outside: Path) -> str:
    return "nothing/here"


def a_file(root: Path, outside: Path) -> str:
    return f"{lay(root / 'x').name}/{CONFIG_NAME}"


def incoming_folder(root: Path, outside: Path) -> str:
    return f"incoming/{lay(root / 'incoming' / 'of-another').name}"


def object_folder(root: Path, outside: Path) -> str:
    return f"objects/{lay(root / 'objects' / ('a' * 64)).name}"


def too_long(root: Path, outside: Path) -> str:
    return "x" * 5000


def empty(root: Path, outside: Path) -> str:
    return ""


PATHS = [
    absolute,
    dot_dot,
    inner_dot_dot,
    linked_folder,
    linked_parent,
    link_inside,
    the_root,
    nul,
    absent,
    a_file,
    incoming_folder,
    object_folder,
    too_long,
    empty,
]


@pytest.mark.parametrize("build", PATHS, ids=lambda f: f.__name__)
async def test_paths_that_are_refused(build: Build, tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    files = LocalAdapterFiles(root)
    incoming = await files.begin()
    with pytest.raises(InvalidRequest) as error:
        await files.import_from(incoming, build(root, outside))
    assert [v.field for v in error.value.violations] == ["store_path"]
    assert str(tmp_path) not in error.value.message
    assert list((root / incoming).iterdir()) == []


def linked_file(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_text("secret")
    (folder / WEIGHTS_NAME).unlink()
    (folder / WEIGHTS_NAME).symlink_to(secret)


def pickle_file(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")


def fifo(folder: Path) -> None:
    (folder / WEIGHTS_NAME).unlink()
    os.mkfifo(folder / WEIGHTS_NAME)


def folder_as_file(folder: Path) -> None:
    (folder / WEIGHTS_NAME).unlink()
    (folder / WEIGHTS_NAME).mkdir()


def large_file(folder: Path) -> None:
    with (folder / WEIGHTS_NAME).open("wb") as file:
        file.truncate((3 << 20) + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (linked_file, "symbolic link"),
        (pickle_file, "pickle"),
        (fifo, "regular file"),
        (folder_as_file, "regular file"),
        (large_file, "more than"),
    ],
)
async def test_files_that_are_refused(change: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path, max_weights_bytes=3 << 20)
    change(lay(tmp_path / "x"))
    incoming = await files.begin()
    with pytest.raises(InvalidRequest) as error:
        await files.import_from(incoming, "x")
    assert [v.field for v in error.value.violations] == [WEIGHTS_NAME]
    assert says in error.value.message


async def test_sweep_takes_only_what_is_old(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    old, new = await written(files), await written(files)
    for path in [tmp_path / old, *(tmp_path / old).iterdir()]:
        os.utime(path, (1, 1))
    os.utime(tmp_path / new, (1, 1))  # a file in it was written lately
    assert await files.sweep(now_unix_s=time.time(), older_than_s=60) == 1
    assert [p.name for p in (tmp_path / "incoming").iterdir()] == [Path(new).name]
    assert await LocalAdapterFiles(tmp_path / "absent").sweep(now_unix_s=time.time(), older_than_s=60) == 0


async def committed(files: AdapterFiles, weights: bytes) -> Any:
    incoming = await written(files, weights=weights)
    uid = await files.finish(incoming)
    await files.commit(incoming, uid)
    return uid


async def test_collect_takes_what_is_old_and_not_referenced(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    kept, fresh, gone = [await committed(files, data) for data in (b"kept", b"fresh", b"gone")]
    for uid in (kept, gone):
        os.utime(tmp_path / "objects" / uid, (1, 1))
    (tmp_path / "objects" / "not-a-uid").mkdir()
    assert await files.collect([kept], now_unix_s=time.time(), older_than_s=60) == [gone]
    assert {p.name for p in (tmp_path / "objects").iterdir()} == {kept, fresh, "not-a-uid"}
    assert list((tmp_path / "incoming").iterdir()) == []
    os.utime(tmp_path / "objects" / fresh, (1, 1))
    await committed(files, b"fresh")  # added again: it is in use again
    assert await files.collect([kept], now_unix_s=time.time(), older_than_s=60) == []


async def test_memory_store_ages_as_it_is_told() -> None:
    now = 0.0
    files = MemoryAdapterFiles(now_unix_s=lambda: now)
    uid = await committed(files, b"x")
    await files.begin()
    now = 100.0
    assert await files.collect([], now_unix_s=now, older_than_s=200.0) == []
    assert await files.collect([uid], now_unix_s=now, older_than_s=50.0) == []
    assert await files.collect([], now_unix_s=now, older_than_s=50.0) == [uid]
    assert await files.sweep(now_unix_s=now, older_than_s=50.0) == 1
    assert files.files == {}


def test_uids_in_paths() -> None:
    with pytest.raises(AssertionError):
        adapter_files.object_path("../x")  # type: ignore[arg-type]
