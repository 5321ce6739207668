"""An etcd that is not there, and one that does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from manylora_shared.coordination import binary
from manylora_shared.coordination.binary import EtcdFailed, EtcdNotFound, find_etcd, free_port, start_etcd

pytestmark = pytest.mark.e2e  # each starts an etcd of its own, and kills it


def test_a_port_is_given_once_and_never_one_that_connections_take() -> None:
    given = [free_port() for _ in range(100)]
    assert len(set(given)) == 100
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert bound.getsockname()[1] not in range(binary._PORTS.start, binary._PORTS.stop)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(binary, "_PORTS", range(port, port + 2))
        assert {free_port(), free_port()} == {port + 1}
        monkeypatch.setattr(binary, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            free_port()


async def test_a_missing_binary_and_a_failing_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(EtcdFailed, match="not a directory"):
        await start_etcd(tmp_path, client_port=free_port())
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_etcd().name == "etcd"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtcdNotFound, match="etcd-server"):
        find_etcd()
