"""What workers tell for the status alone; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from manylora.v1 import status_pb2, worker_pb2

T = TypeVar("T", status_pb2.TenantSetbacks, status_pb2.TenantAdapters)


class Told:
    """Over one Control stream."""

    def __init__(self) -> None:
        self.counters = status_pb2.WorkerCounters()
        self.setbacks: dict[str, status_pb2.TenantSetbacks] = {}
        self.adapters: dict[str, status_pb2.TenantAdapters] = {}
        self.kv_block_bytes = 0

    def take(self, report: worker_pb2.ControlReport) -> None:
        """Copies: a part that is kept would keep its whole report."""
        if report.snapshot:
            self.kv_block_bytes = report.kv_block_bytes
        self.counters.CopyFrom(report.counters)
        for setbacks in report.setbacks:
            self.setbacks.setdefault(setbacks.tenant_id, status_pb2.TenantSetbacks()).CopyFrom(setbacks)
        for adapters in report.tenant_adapters:
            if adapters == status_pb2.TenantAdapters(tenant_id=adapters.tenant_id):
                self.adapters.pop(adapters.tenant_id, None)
                continue
            self.adapters.setdefault(adapters.tenant_id, status_pb2.TenantAdapters()).CopyFrom(adapters)


def sums(kind: type[T], tellers: Iterable[Mapping[str, T]]) -> list[T]:
    """By tenant, sorted."""
    names = [field.name for field in kind.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_UINT64]
    found: dict[str, T] = {}
    for tenants in tellers:
        for tenant_id, told in tenants.items():
            total = found.setdefault(tenant_id, kind(tenant_id=tenant_id))
            for name in names:
                setattr(total, name, getattr(total, name) + getattr(told, name))
    return [found[tenant_id] for tenant_id in sorted(found)]


def adapter_sums(tellers: Iterable[Mapping[str, status_pb2.TenantAdapters]]) -> list[status_pb2.TenantAdapters]:
    """Pins as the first worker tells that has them, with the first problem told."""
    workers = list(tellers)
    totals = sums(status_pb2.TenantAdapters, workers)
    for total in totals:
        pins: dict[str, status_pb2.PinStatus] = {}
        for pin in (pin for worker in workers if total.tenant_id in worker for pin in worker[total.tenant_id].pins):
            if pin.name not in pins:
                pins[pin.name] = total.pins.add(name=pin.name, adapter_version=pin.adapter_version)
            sum_ = pins[pin.name]
            sum_.workers += pin.workers
            sum_.on_device += pin.on_device
            sum_.problem = sum_.problem or pin.problem
    return totals
