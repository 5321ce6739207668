"""Which key a client presents where it was given none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manylora.client.credentials import KEY_VARIABLE, find_key, read_key, remove_note, write_note


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path


def key_file(folder: Path, name: str = "operator.key", key: str = "mlk-1") -> Path:
    path = folder / name
    path.write_text(f"{key}\n")
    return path


def test_the_environment_goes_before_a_note(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key("127.0.0.1:1") == ""
    write_note("127.0.0.1:1", key_file(state))
    assert find_key("127.0.0.1:1") == "mlk-1"
    monkeypatch.setenv(KEY_VARIABLE, " mlk-2 ")
    assert find_key("127.0.0.1:1") == "mlk-2"


def test_a_note_is_of_one_address_under_whatever_name_of_this_machine(state: Path) -> None:
    write_note("127.0.0.1:1", key_file(state))
    assert [find_key(f"{host}:1") for host in ("localhost", "127.0.0.1", "")] == ["mlk-1"] * 3
    assert find_key("127.0.0.1:2") == ""
    assert find_key("example.com:1") == ""


def test_several_routers_get_the_key_of_the_one_cluster_that_they_are_of(state: Path) -> None:
    key = key_file(state)
    for port in (1, 2):
        write_note(f"127.0.0.1:{port}", key)
    write_note("127.0.0.1:3", key_file(state, "another", "mlk-2"))
    assert find_key("127.0.0.1:1, localhost:2") == "mlk-1"
    assert find_key("127.0.0.1:1,127.0.0.1:3") == ""
    assert find_key("127.0.0.1:1,example.com:1") == ""


def test_a_note_is_taken_away_by_its_own_cluster_alone(state: Path) -> None:
    first, second = key_file(state, "first"), key_file(state, "second", "mlk-2")
    write_note("127.0.0.1:1", first)
    write_note("127.0.0.1:1", second)
    remove_note("127.0.0.1:1", first)
    assert find_key("127.0.0.1:1") == "mlk-2"
    remove_note("127.0.0.1:1", second)
    remove_note("127.0.0.1:1", second)
    assert find_key("127.0.0.1:1") == ""


def test_a_key_file_that_is_gone_is_no_key_and_one_that_cannot_be_read_an_error(state: Path) -> None:
    path = key_file(state)
    write_note("127.0.0.1:1", path)
    path.unlink()
    assert find_key("127.0.0.1:1") == ""
    path.mkdir()
    with pytest.raises(OSError, match=os.strerror(21)):
        find_key("127.0.0.1:1")


def test_of_a_file_that_is_no_key_little_is_read(state: Path) -> None:
    path = state / "large"
    path.write_bytes(b"\xff" * 100_000)
    assert len(read_key(path)) == 256
