"""The adapter backend: tiers, events, errors, and that the engine's thread is left alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manylora_shared.errors import InvalidRequest, ServiceUnavailable
from manylora_shared.ids import AdapterUid
from manylora_worker.config import WorkerConfig
from manylora_worker.kinds.api import AdapterEvent, AdapterTier
from manylora_worker.models.build import build_engine, on_device
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.torch.model_runner import TorchModelRunner
from manylora_worker.weights.backend import TorchAdapterBackend
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.reader import AdapterReader, LocalReader
from manylora_worker.weights.reader_pool import ReaderProcesses
from manylora_worker.weights.source import AdapterBase, AdapterLimits
from manylora_worker.weights.store import FolderStore

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, put_adapter


class Setup:
    """`reader`: makes what the backend reads with."""

    def __init__(
        self, family: Family, store: Path, reader: Callable[[AdapterBase, AdapterLimits], AdapterReader] = LocalReader
    ) -> None:
        self.family = family
        self.runner = make_runner(family.loaded)
        self.woken = threading.Semaphore(0)
        self.objects = store / "objects"
        self.uids = family.put_adapters(self.objects)
        self.backend = TorchAdapterBackend(
            FolderStore(store), reader(family.loaded.adapter_base(), LIMITS), self.runner, notify=self.woken.release
        )

    def next_events(self, count: int = 1) -> list[AdapterEvent]:
        for _ in range(count):
            assert self.woken.acquire(timeout=60)
        return list(self.backend.poll())


@pytest.fixture
def setup(family_of: FamilyOf, tmp_path: Path) -> Iterator[Setup]:
    made = Setup(family_of("llama"), tmp_path)
    yield made
    made.backend.close()
    made.backend.close()


def make_processes(base: AdapterBase, limits: AdapterLimits) -> ReaderProcesses:
    return ReaderProcesses(base, limits, HostMemory(1 << 20))


@pytest.fixture
def setup_of_processes(family_of: FamilyOf, tmp_path: Path) -> Iterator[Setup]:
    """As a GPU's worker reads."""
    made = Setup(family_of("llama"), tmp_path, make_processes)
    yield made
    made.backend.close()
    made.backend.close()


def test_up_and_down_the_tiers(setup: Setup) -> None:
    uid = setup.uids["patterns"]
    assert list(setup.backend.poll()) == []
    setup.backend.start_host_load(uid)
    (event,) = setup.next_events()
    assert (event.uid, event.tier, event.error) == (uid, AdapterTier.HOST, None)
    assert event.size_bytes > 0
    setup.backend.start_device_load(uid)
    (event,) = setup.next_events()
    assert (event.tier, event.error) == (AdapterTier.DEVICE, None)
    prompt = [5, 6, 7, 8]
    (logits,) = Driver(setup.runner).logits([Stream(prompt, uid)])
    expected = setup.family.reference.logits(prompt, "patterns")[-1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    setup.backend.drop_host(uid)
    setup.backend.drop_device(uid)
    assert not setup.runner.adapters
    setup.backend.start_device_load(uid)
    (event,) = setup.next_events()
    assert event.error == "the adapter is no longer in host memory"


def test_up_and_down_the_tiers_with_readers_of_their_own(setup_of_processes: Setup) -> None:
    test_up_and_down_the_tiers(setup_of_processes)
    test_errors_are_events(setup_of_processes)


def test_what_is_lent_is_found_there_until_the_store_has_it(setup: Setup, tmp_path: Path) -> None:
    uid = setup.uids["rank-1"]
    incoming, stored = tmp_path / "incoming", setup.objects / uid
    stored.rename(incoming)

    def load() -> str | None:
        setup.backend.start_host_load(uid)
        (event,) = setup.next_events()
        if event.error is None:
            setup.backend.drop_host(uid)
        return event.error

    with setup.backend.lends(uid, "incoming"), setup.backend.lends(uid, "incoming"):
        assert load() is None
    assert "not a folder" in (load() or "")
    with setup.backend.lends(uid, "gone"):
        assert "not a folder" in (load() or "")
        incoming.rename(stored)
        assert load() is None


def test_events_come_in_the_order_asked(setup: Setup) -> None:
    for uid in setup.uids.values():
        setup.backend.start_host_load(uid)
    assert [e.uid for e in setup.next_events(len(setup.uids))] == list(setup.uids.values())


def test_errors_are_events(setup: Setup) -> None:
    spoiled, absent = setup.uids["rank-1"], AdapterUid("f" * 64)
    weights = setup.objects / spoiled / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    setup.backend.start_host_load(spoiled)
    setup.backend.start_host_load(absent)
    first, second = setup.next_events(2)
    assert "not what was registered" in (first.error or "")
    assert "not a folder" in (second.error or "")


class Far(FolderStore):
    """A far store that fails with `error` where there is one."""

    error: Exception | None = None
    is_far = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.brought: dict[AdapterUid, None] = {}

    def has(self, uid: AdapterUid) -> bool:
        return uid in self.brought

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        if self.error is not None:
            raise self.error
        self.brought[uid] = None


def test_whose_the_failure_of_a_fetch_is(setup: Setup, tmp_path: Path) -> None:
    store, reader = Far(tmp_path), LocalReader(setup.family.loaded.adapter_base(), LIMITS)
    backend = TorchAdapterBackend(store, reader, setup.runner, notify=setup.woken.release)
    uid = setup.uids["rank-1"]

    def fetch() -> AdapterEvent:
        backend.start_fetch(uid)
        assert setup.woken.acquire(timeout=10)
        (event,) = backend.poll()
        return event

    for error, is_passing in (
        (ServiceUnavailable("the bucket cannot be used now"), True),
        (OSError("the disk is full"), True),
        (InvalidRequest.of("adapter", "is not what was registered"), False),
    ):
        store.error = error
        assert fetch() == AdapterEvent(uid, AdapterTier.DISK, error=str(error), is_passing=is_passing)
        assert not backend.is_near(uid)
    store.error = None
    assert fetch() == AdapterEvent(uid, AdapterTier.DISK)
    assert backend.is_near(uid)
    backend.close()


def test_the_engines_threads_are_its_own(setup: Setup) -> None:
    """The loader sets one compute thread for itself; the engine's count stays."""
    torch.set_num_threads(2)
    try:
        setup.backend.start_host_load(setup.uids["all-linear"])
        setup.next_events()
        assert torch.get_num_threads() == 2
        counts: list[int] = []
        runner = TorchModelRunner(setup.runner._loaded, None, setup.runner._cache, setup.runner._planner)

        def step() -> None:
            Driver(runner).step([Stream([5, 6])])
            counts.append(torch.get_num_threads())

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert counts == [setup.family.loaded.num_threads]
    finally:
        torch.set_num_threads(1)


def test_a_dead_loader_is_told(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("manylora_worker.weights.reader.read_adapter", explode)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    setup.backend.start_host_load(setup.uids["rank-1"])
    assert setup.woken.acquire(timeout=10)
    with pytest.raises(RuntimeError, match="has died"):
        setup.backend.poll()


def test_steps_go_on_while_adapters_load(setup: Setup) -> None:
    """Loading every adapter again and again beside the engine changes no result of the streams that run."""
    uid = put_adapter(setup.runner, setup.family.loaded, setup.family.adapters["all-linear"])
    prompt = [9, 8, 7]
    expected = setup.family.reference.greedy(prompt, "all-linear", 30)
    others = [u for u in setup.uids.values() if u != uid]
    stream = Stream(prompt, uid)
    driver = Driver(setup.runner)
    started = 0
    while len(stream.output) < 30:
        for other in others:
            setup.backend.start_host_load(other)
            setup.backend.start_device_load(other)
            started += 2
        driver.step([stream])
        for event in setup.backend.poll():
            started -= 1
            if event.tier is AdapterTier.DEVICE:
                setup.backend.drop_device(event.uid)
    assert stream.output == expected
    deadline = time.monotonic() + 20
    while started and time.monotonic() < deadline:
        started -= len(setup.backend.poll())
        time.sleep(0.005)
    assert started == 0


def test_factory(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    folder = family.adapters["patterns"]
    settings = WorkerConfig(
        model=str(family.folder), adapter_store=folder.parent, kv_cache_mb=1, block_size=8, threads=1
    )
    parts = build_engine(settings)
    try:
        kv = family.loaded.spec.kv
        block_bytes = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * 4 * 8
        assert parts.runner.num_blocks == (1 << 20) // block_bytes
        assert parts.runner.block_size == 8
        assert parts.runner.vocab_size == family.loaded.spec.vocab_size
        assert parts.runner.max_context_tokens == 256
        report = asyncio.run(parts.validator.validate(folder.name, AdapterUid("0" * 64)))
        assert report.max_lora_rank == 9
        assert report.size_bytes > 0
        assert "q_proj" in report.target_modules
    finally:
        parts.backend.close()
    with pytest.raises(ModelRefused, match="kv_cache_mb"):
        build_engine(replace(settings, block_size=100_000))


@pytest.mark.parametrize(("sees_one", "device", "dtype"), [(True, "cuda", "bfloat16"), (False, "cpu", "float32")])
def test_a_device_that_is_not_given_is_a_gpu_where_there_is_one(
    sees_one: bool, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_one)
    settled = on_device(WorkerConfig(model="m"))
    assert (settled.device, settled.compute_dtype) == (device, dtype)
    assert on_device(replace(settled, device="cuda:1")).device == "cuda:1"
