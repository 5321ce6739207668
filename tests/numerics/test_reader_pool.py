"""ReaderProcesses: as a read in this process, and what becomes of a read whose process dies, hangs or raves."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from manylora_shared.encryption.sealing import Sealed
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_files import FILE_NAMES
from manylora_shared.stores.stored_files import FileSealer
from manylora_worker.weights import reader_pool
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.reader import LocalReader
from manylora_worker.weights.reader_pool import ReaderFailed, ReaderProcesses, _Reader
from manylora_worker.weights.source import AdapterBase, AdapterInvalid, read_adapter
from safetensors.torch import load_file, save_file

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import LIMITS
from tests.sealing_keys import MemoryKeys

_HOST_BYTES = 8 << 20


@pytest.fixture(scope="module")
def family(family_of: FamilyOf) -> Family:
    return family_of("llama")


@pytest.fixture(scope="module")
def base(family: Family) -> AdapterBase:
    return family.loaded.adapter_base()


class Pool(ReaderProcesses):
    """Whose memory and processes a test may look at."""

    def __init__(self, base: AdapterBase, memory: HostMemory, patience_s: float = 30.0) -> None:
        super().__init__(base, LIMITS, memory, patience_s=patience_s)
        self.memory = memory

    @property
    def fork_server(self) -> psutil.Process:
        return psutil.Process(self._fork_server._process.pid)

    @property
    def readers(self) -> list[psutil.Process]:
        return [p for p in self.fork_server.children() if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def started(base: AdapterBase) -> Iterator[Pool]:
    pool = Pool(base, HostMemory(_HOST_BYTES))
    yield pool
    processes = [pool.fork_server, *pool.readers]
    pool.close()
    pool.close()
    await_ended(processes)


@pytest.fixture
def pool(started: Pool) -> Iterator[Pool]:
    """One for all tests, for its start takes seconds; none may leave memory taken."""
    yield started
    assert started.memory.free_bytes == _HOST_BYTES


def await_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def await_true(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it does not come true")


def uid_of(folder: Path, base: AdapterBase) -> AdapterUid:
    return read_adapter(folder, base, LIMITS).uid


def read_beside(pool: ReaderProcesses, folder: Path, uid: AdapterUid) -> Callable[[], Exception | None]:
    """Begins a read in a thread; the function returned waits for it, and says what it raised."""
    raised: list[Exception | None] = []

    def run() -> None:
        try:
            pool.free(pool.read(folder, uid))
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Exception | None:
        thread.join(20)
        assert not thread.is_alive(), "the read hangs"
        return raised[0]

    return wait


def test_weights_are_as_read_here(pool: Pool, family: Family, base: AdapterBase) -> None:
    for folder in family.adapters.values():
        expected = read_adapter(folder, base, LIMITS)
        adapter = pool.read(folder, expected.uid)
        assert adapter.uid == expected.uid
        assert adapter.layout == expected.layout
        assert torch.equal(adapter.buffer, expected.buffer)
        assert pool.memory.free_bytes < _HOST_BYTES
        pool.free(adapter)
        assert pool.check(folder) == (expected.layout, expected.extras)
    assert len(pool.readers) == 1, "one after the other, one process serves"


def spoil_config(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 0, "use_dora": True, "\ud800": 1, "ä": [2]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def spoil_values(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, weights)


def spoil_header(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])


@pytest.mark.parametrize("spoil", [spoil_config, spoil_values, spoil_header, shutil.rmtree])
def test_refusals_are_as_here(
    pool: Pool, family: Family, base: AdapterBase, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(family.adapters["all-linear"], folder)
    spoil(folder)
    uid = uid_of(family.adapters["all-linear"], base)
    local = LocalReader(base, LIMITS)
    for read in (lambda reader: reader.read(folder, uid), lambda reader: reader.check(folder)):
        with pytest.raises(AdapterInvalid) as expected:
            read(local)
        with pytest.raises(AdapterInvalid) as raised:
            read(pool)
        assert str(raised.value) == str(expected.value)
        assert raised.value.violations == expected.value.violations


def test_another_content_is_refused_as_here(pool: Pool, family: Family, base: AdapterBase) -> None:
    folder = family.adapters["rank-1"]
    with pytest.raises(AdapterInvalid, match="not what was registered") as expected:
        LocalReader(base, LIMITS).read(folder, AdapterUid("0" * 64))
    with pytest.raises(AdapterInvalid) as raised:
        pool.read(folder, AdapterUid("0" * 64))
    assert str(raised.value) == str(expected.value)


def test_calls_at_once_have_a_process_each(pool: Pool, family: Family, base: AdapterBase) -> None:
    folders = list(family.adapters.values())[:4]
    waits = [read_beside(pool, folder, uid_of(folder, base)) for folder in folders for _ in range(5)]
    assert [wait() for wait in waits] == [None] * 20
    assert 1 <= len(pool.readers) <= 20


@pytest.mark.wide
def test_what_fits_in_no_hole_is_read_into_memory_of_its_own(family: Family, base: AdapterBase) -> None:
    pool = Pool(base, HostMemory(4096))
    try:
        expected = read_adapter(family.adapters["all-linear"], base, LIMITS)
        for _ in range(2):
            adapter = pool.read(family.adapters["all-linear"], expected.uid)
            assert torch.equal(adapter.buffer, expected.buffer)
            pool.free(adapter)
        assert pool.memory.free_bytes == 4096
        assert not pool.memory._apart
    finally:
        pool.close()


def test_a_death_fails_the_one_read(pool: Pool, family: Family, base: AdapterBase) -> None:
    folder = family.adapters["all-linear"]
    uid = uid_of(folder, base)
    pool.free(pool.read(folder, uid))
    before = pool.readers
    for reader in before:
        reader.suspend()
    wait = read_beside(pool, folder, uid)
    await_true(lambda: len(pool._idle) < len(before))
    for reader in before:
        reader.kill()
    error = wait()
    assert isinstance(error, ReaderFailed)
    assert str(error) == "the process that read the adapter died"
    await_ended(before)
    pool.free(pool.read(folder, uid))
    assert not {p.pid for p in pool.readers} & {p.pid for p in before}


def test_a_death_while_weights_are_written_gives_the_memory_back(
    pool: Pool, family: Family, base: AdapterBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family.adapters["all-linear"]
    uid = uid_of(folder, base)
    allocate = HostMemory.allocate

    def kill_and_allocate(memory: HostMemory, elements: int, dtype: torch.dtype) -> torch.Tensor:
        for reader in pool.readers:
            reader.kill()
        return allocate(memory, elements, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "allocate", kill_and_allocate)
        with pytest.raises(ReaderFailed, match="died"):
            pool.read(folder, uid)
    assert pool.memory.free_bytes == _HOST_BYTES
    pool.free(pool.read(folder, uid))


def test_no_memory_for_it_fails_the_one_read(
    pool: Pool, family: Family, base: AdapterBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("cannot be pinned")

    folder = family.adapters["all-linear"]
    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "allocate", refuse)
        with pytest.raises(RuntimeError, match="cannot be pinned"):
            pool.read(folder, uid_of(folder, base))
    pool.free(pool.read(folder, uid_of(folder, base)))


def test_a_reader_that_died_idle_fails_nobody(pool: Pool, family: Family, base: AdapterBase) -> None:
    folder = family.adapters["rank-1"]
    pool.free(pool.read(folder, uid_of(folder, base)))
    before = pool.readers
    for reader in before:
        reader.kill()
    await_ended(before)
    pool.free(pool.read(folder, uid_of(folder, base)))


def test_the_fork_servers_death_takes_its_readers_and_it_starts_anew(
    pool: Pool, family: Family, base: AdapterBase
) -> None:
    folder = family.adapters["rank-1"]
    pool.free(pool.read(folder, uid_of(folder, base)))
    before = [pool.fork_server, *pool.readers]
    before[0].kill()
    await_true(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in before))
    pool.free(pool.read(folder, uid_of(folder, base)))
    await_ended(before)


def test_a_read_that_takes_too_long_is_ended(
    pool: Pool, family: Family, base: AdapterBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family.adapters["rank-1"]
    uid = uid_of(folder, base)
    pool.free(pool.read(folder, uid))
    before = pool.readers
    for reader in before:
        reader.suspend()
    monkeypatch.setattr(pool, "_patience_s", 0.05)
    with pytest.raises(ReaderFailed, match="took too long"):
        pool.read(folder, uid)
    monkeypatch.undo()
    await_true(lambda: len(pool.readers) == len(before) - 1)
    for reader in pool.readers:
        reader.resume()
    pool.free(pool.read(folder, uid))


def framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (framed(b"?"), "made no sense"),
        (framed(b"[]"), "made no sense"),
        (framed(b"{}"), "made no sense"),
        (framed(b'{"ranks": [1]}'), "made no sense"),
        (framed(b'{"violations": []}'), "made no sense"),
        (framed(b'{"violations": [1]}'), "made no sense"),
        (framed(b'{"elements": "x"}'), "made no sense"),
        (framed(b"{}")[:5], "took too long"),
        (struct.pack("!i", 1 << 30), "made no sense"),
        (framed(b"{}") * 10_000, "made no sense"),
    ],
)
def test_a_reader_that_makes_no_sense_is_ended(
    pool: Pool,
    family: Family,
    base: AdapterBase,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    why: str,
) -> None:
    monkeypatch.setattr(reader_pool, "_MESSAGE_S", 0.1)
    ours, theirs = socket.socketpair()
    with theirs:
        raving = subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()])
        theirs.sendall(said)
    reader = _Reader(ours)
    reader.pid = raving.pid
    pool._fork_server.fork, fork = lambda: reader, pool._fork_server.fork
    idle, pool._idle = pool._idle, []
    try:
        with pytest.raises(ReaderFailed, match=why):
            pool.read(family.adapters["rank-1"], uid_of(family.adapters["rank-1"], base))
        assert raving.wait(10) == -signal.SIGKILL
    finally:
        pool._idle, pool._fork_server.fork = idle, fork
        raving.kill()


_WORKER = """
import pickle, socket, sys
from pathlib import Path
import manylora_worker.weights.reader_pool as reader_pool
from manylora_worker.weights.host_memory import HostMemory

base, limits, folder, uid = pickle.load(open(sys.argv[1], "rb"))
listening = socket.create_server(("127.0.0.1", 0))
listening.set_inheritable(True)
pool = reader_pool.ReaderProcesses(base, limits, HostMemory(8 << 20))
pool.free(pool.read(folder, uid))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.wide
def test_processes_end_with_the_worker_and_have_none_of_its_sockets(
    family: Family, base: AdapterBase, tmp_path: Path
) -> None:
    folder = family.adapters["rank-1"]
    (tmp_path / "arguments").write_bytes(pickle.dumps((base, LIMITS, folder, uid_of(folder, base))))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath}
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path / "arguments")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        fork_server, reader = psutil.Process(worker.pid).children(recursive=True)
        assert fork_server.num_threads() == 1, "a fork would copy the locks of the others"
        for process in (fork_server, reader):
            assert not process.net_connections("inet")
            links = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
            assert sum(link.startswith("socket:") for link in links) == 1
        reader.suspend()  # as one in the middle of a read would be: it cannot hear that its socket has ended
        worker.kill()
    await_ended([fork_server, reader])


def test_a_sealed_adapter_is_read_as_a_plain_one(family: Family, base: AdapterBase, tmp_path: Path) -> None:
    plain, keys = family.adapters["all-linear"], MemoryKeys()
    for name in FILE_NAMES:
        sealer = FileSealer(tmp_path / name, keys.sealing("acme"))
        sealer.add((plain / name).read_bytes())
        sealer.end()
    expected = read_adapter(plain, base, LIMITS)
    uid = expected.uid
    local = LocalReader(base, LIMITS, keys)
    memory = HostMemory(_HOST_BYTES)
    pool = ReaderProcesses(base, LIMITS, memory, keys=keys)
    try:
        for reader in (local, pool):
            assert reader.check(tmp_path) == (expected.layout, expected.extras)
            adapter = reader.read(tmp_path, uid)
            assert torch.equal(adapter.buffer, expected.buffer)
            reader.free(adapter)
        assert coverage_of(tmp_path, expected.layout, base, keys=keys) == coverage_of(plain, expected.layout, base)
        for name in FILE_NAMES:
            whole = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(whole[:20])
            for reader in (local, pool):
                with pytest.raises(AdapterInvalid, match=f"{name}: the sealed file ends in its header"):
                    reader.read(tmp_path, uid)
            (tmp_path / name).write_bytes(whole)
        weights = tmp_path / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        for reader in (local, pool):
            with pytest.raises(AdapterInvalid, match="not what was sealed"):
                reader.read(tmp_path, uid)
        keys.destroy("acme")
        for reader in (local, pool):
            with pytest.raises(Sealed, match="destroyed"):
                reader.read(tmp_path, uid)
    finally:
        pool.close()
