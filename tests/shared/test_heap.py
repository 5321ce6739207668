from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref

import pytest
from manylora_shared.process import heap
from manylora_shared.process.heap import collect_seldom, collector_paused, give_back, resident_bytes


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_after_a_pause(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), collector_paused():
            _ = 1 // 0
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_young_objects_are_still_collected_but_the_whole_heap_seldom() -> None:
    """A cycle goes once some hundreds of objects came after it, and old objects are left alone meanwhile."""

    class Node:
        me: object

    was_enabled, before, generations = gc.isenabled(), gc.get_threshold(), []
    watch = lambda phase, info: generations.append(info["generation"]) if phase == "start" else None  # noqa: E731
    try:
        collect_seldom()
        gc.enable()
        node = Node()
        node.me = node
        gone = weakref.ref(node)
        gc.callbacks.append(watch)
        del node
        kept = [[i] for i in range(50_000)]
        assert gone() is None
        assert len(kept) == 50_000
        assert 400 <= len(generations) <= 600
        assert set(generations) == {0}
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*before)
        if not was_enabled:
            gc.disable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
async def test_what_a_flood_took_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "LOOK_EVERY_S", 0.05)
    giving = asyncio.create_task(give_back())
    await asyncio.sleep(0.1)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    before = resident_bytes()
    taken = [libc.malloc(16_000) for _ in range(20_000)]
    for address in taken:
        ctypes.memset(address, 1, 16_000)
    kept = taken.pop()  # the last: above it nothing is free, so free() gives nothing back
    for address in taken:
        libc.free(ctypes.c_void_p(address))
    held = resident_bytes()
    await asyncio.sleep(0.5)
    assert resident_bytes() < before + (100 << 20)
    assert held > before + (200 << 20), "else this shows nothing"
    libc.free(ctypes.c_void_p(kept))
    giving.cancel()
