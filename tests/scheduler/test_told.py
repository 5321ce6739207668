"""What workers tell for the status alone: kept over a stream, and added up."""

from __future__ import annotations

from manylora.v1 import status_pb2, worker_pb2
from manylora_scheduler.serving.told import Told, adapter_sums, sums


def test_what_is_told_last_stands_and_an_empty_part_is_forgotten() -> None:
    told = Told()
    adapters = status_pb2.TenantAdapters(tenant_id="acme", host_bytes=2)
    told.take(worker_pb2.ControlReport(snapshot=True, kv_block_bytes=64, tenant_adapters=[adapters]))
    grown = status_pb2.TenantSetbacks(tenant_id="acme", preemptions=3)
    counters = status_pb2.WorkerCounters(generated_tokens=5)
    told.take(worker_pb2.ControlReport(setbacks=[grown], counters=counters))
    assert (told.kv_block_bytes, told.counters, told.setbacks, told.adapters) == (
        64,
        counters,
        {"acme": grown},
        {"acme": adapters},
    )
    told.take(worker_pb2.ControlReport(tenant_adapters=[status_pb2.TenantAdapters(tenant_id="acme")]))
    assert told.adapters == {}


def test_every_count_of_the_message_is_added_up() -> None:
    """Also one that the message gets tomorrow."""
    kind = status_pb2.TenantSetbacks
    names = [field.name for field in kind.DESCRIPTOR.fields if field.name != "tenant_id"]
    one, other = (kind(tenant_id="acme", **{name: n + i for i, name in enumerate(names)}) for n in (1, 10))
    (total,) = sums(kind, [{"acme": one}, {"acme": other}, {}])
    assert {name: getattr(total, name) for name in names} == {name: 11 + 2 * i for i, name in enumerate(names)}


def test_pins_are_counted_by_name_in_the_order_of_the_first_worker() -> None:
    def adapters(*pins: tuple[str, int, str]) -> dict[str, status_pb2.TenantAdapters]:
        told = [status_pb2.PinStatus(name=n, workers=1, on_device=d, problem=p) for n, d, p in pins]
        return {"acme": status_pb2.TenantAdapters(tenant_id="acme", pins=told)}

    (total,) = adapter_sums([adapters(("b", 1, ""), ("a", 0, "")), adapters(("a", 1, ""), ("b", 0, "it is gone"))])
    assert [(p.name, p.workers, p.on_device, p.problem) for p in total.pins] == [
        ("b", 2, 1, "it is gone"),
        ("a", 2, 1, ""),
    ]
