"""Hits and misses of adapters, by version."""

from __future__ import annotations

from manylora_router.history.adapter_use import MAX_ADAPTERS_OF_TENANT, AdapterUses


def test_where_weights_were_is_counted() -> None:
    uses = AdapterUses()
    for found, waited_ms in (("device", 9.0), ("host", 4.0), ("store", 100.0), ("device", 0.0)):
        uses.used("acme", "a@1", found=found, waited_ms=waited_ms, now=3.0)
    use = uses.get("acme", "a@1")
    assert use is not None
    assert (use.requests, use.on_device, use.on_host, use.in_store) == (4, 2, 1, 1)
    assert use.waited_ms == 104.0, "of those that found it on the device nothing counts"
    assert uses.get("other", "a@1") is None


def test_the_latest_come_first_and_there_are_so_many() -> None:
    uses = AdapterUses()
    uses.used("other", "x@1", found="device", waited_ms=0.0, now=0.0)
    for number in range(1000):
        uses.used("acme", f"a{number}@1", found="device", waited_ms=0.0, now=float(number))
    assert next(uses.latest("acme")).reference == "a999@1"
    assert len(uses) == MAX_ADAPTERS_OF_TENANT + 1
    assert [use.tenant for use in uses.latest("other")] == ["other"]
