"""A PEFT adapter's folder, cut into chunks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manylora.client.answers import RequestFailed
from manylora.client.folder import AdapterFolder
from manylora_shared.stores.adapter_files import CONFIG_NAME, MAX_CHUNK_BYTES, WEIGHTS_NAME
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / CONFIG_NAME).write_bytes(b"{}")
    (path / WEIGHTS_NAME).write_bytes(bytes(range(256)) * (MAX_CHUNK_BYTES // 256) + b"rest")
    (path / "README.md").write_text("not sent")
    return path


def test_all_bytes_go_in_order_and_none_else(folder: Path) -> None:
    opened = AdapterFolder.open(folder)
    sent: dict[str, bytes] = {}
    for name, data in opened.chunks():
        assert len(data) <= MAX_CHUNK_BYTES
        sent[name] = sent.get(name, b"") + data
    assert sent == {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    assert opened.size_bytes == MAX_CHUNK_BYTES + 4 + 2


def test_an_empty_file_is_sent_too(folder: Path) -> None:
    (folder / CONFIG_NAME).write_bytes(b"")
    assert (CONFIG_NAME, b"") in list(AdapterFolder.open(folder).chunks())


def test_every_reason_is_told_as_the_server_would(folder: Path, tmp_path: Path) -> None:
    (folder / CONFIG_NAME).unlink()
    (folder / WEIGHTS_NAME).unlink()
    (folder / WEIGHTS_NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(RequestFailed) as error:
        AdapterFolder.open(folder)
    assert error.value.code == "INVALID_ARGUMENT"
    assert [violation.field for violation in error.value.violations] == [CONFIG_NAME, WEIGHTS_NAME]


def test_a_tokenizer_of_its_own_is_told(folder: Path) -> None:
    assert AdapterFolder.open(folder).tokenizer == BroughtTokenizer()
    (folder / "added_tokens.json").write_text('{"<tool_call>": 320}')
    assert AdapterFolder.open(folder).tokenizer.added_tokens == {"<tool_call>": 320}
    (folder / "added_tokens.json").write_text("{")
    with pytest.raises(RequestFailed, match=r"added_tokens\.json: is not JSON"):
        AdapterFolder.open(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(RequestFailed, match="is not a folder"):
        AdapterFolder.open(folder / CONFIG_NAME)


def test_the_links_of_a_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    sent = list(AdapterFolder.open(folder).chunks())
    snapshot, blobs = tmp_path / "snapshots" / "c0ffee", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (tmp_path / "latest").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "latest"):
        assert list(AdapterFolder.open(path).chunks()) == sent


def test_a_link_to_what_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        (folder / CONFIG_NAME).unlink()
        (folder / CONFIG_NAME).symlink_to(place)
        with pytest.raises(RequestFailed, match=f"{CONFIG_NAME}: is not a regular file"):
            AdapterFolder.open(folder)
