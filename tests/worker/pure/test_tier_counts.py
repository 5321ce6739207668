"""Where requests found their adapters, and how long they waited, by tier."""

from __future__ import annotations

from manylora.v1 import status_pb2
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_sim.fake_runner import FakeFarBackend
from manylora_worker.adapters.cache import AdapterCache, AdapterCacheLimits
from manylora_worker.adapters.tier_counts import Found, FoundCounts

T = TenantId("t")


def test_each_request_counts_where_its_adapters_were_and_waits_for_the_farthest() -> None:
    now = 0.0
    backend = FakeFarBackend(lambda: now, load_s=lambda uid, tier: 1.0)
    cache = AdapterCache(backend, AdapterCacheLimits(100, 100))
    near, far = AdapterUid("near"), AdapterUid("far")
    backend.on_disk[near] = None

    def served(name: str, *uids: AdapterUid) -> None:
        nonlocal now
        holder = RequestId(name)
        is_ready = cache.acquire(holder, T, key_of([Part(uid) for uid in uids]), now)
        while not is_ready:
            is_ready = holder in cache.pump(now).ready
            now += 0 if is_ready else 0.5
        cache.release(holder, now)

    served("cold", near)
    served("warm", near)
    served("both", near, far)
    assert cache.found == Found(
        adapters_found_device=2,
        adapters_found_disk=1,
        adapters_found_store=1,
        cold_starts_disk=1,
        cold_starts_store=1,
        cold_disk_s=2.0,
        cold_store_s=3.0,
    )


def test_the_status_has_every_count_under_its_name() -> None:
    counts = FoundCounts()
    counts.found("host")
    counts.waited("device", 9.0)
    counts.waited("host", 0.25)
    message = status_pb2.WorkerCounters(**counts.counts._asdict())
    assert (message.adapters_found_host, message.cold_starts_host, message.cold_host_s) == (1, 1, 0.25)
