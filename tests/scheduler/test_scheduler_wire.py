"""Between protobuf messages and the core's plain data: what is refused, and what later versions may send."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from manylora.v1 import common_pb2, scheduler_pb2, status_pb2, worker_pb2
from manylora_scheduler.core.reports import Residency
from manylora_scheduler.serving.told import Told
from manylora_scheduler.serving.wire import (
    MAX_SEQUENCES,
    MAX_WORKER_TENANTS,
    flow_key,
    held_lease,
    overload_message,
    queued_request,
    refused_flows,
    worker_report,
    worker_status,
)
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.tenancy.overload import OverloadView, TenantView

from tests.scheduler.helpers import ROUTER, Desk


def test_a_keys_limits() -> None:
    key = scheduler_pb2.KeyLimits(key_id="k1", requests_per_min=3, concurrency=2)
    read = queued_request(enqueue(key=key), ROUTER, now=0.0, enqueued_ns=0)
    assert read.limits == KeyLimits("k1", requests_per_min=3, concurrency=2)
    assert queued_request(enqueue(), ROUTER, now=0.0, enqueued_ns=0).limits is None
    for wrong in (scheduler_pb2.KeyLimits(), scheduler_pb2.KeyLimits(key_id="k", tokens_per_min=2_000_000_000)):
        with pytest.raises(InvalidRequest):
            queued_request(enqueue(key=wrong), ROUTER, now=0.0, enqueued_ns=0)


def enqueue(**fields: Any) -> scheduler_pb2.Enqueue:
    return scheduler_pb2.Enqueue(**{"request_id": "r", "tenant_id": "acme", **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", "x" * 257),
        ("tenant_id", "A"),
        ("adapter_uid", "ab"),
        ("adapter_uid", "ab" * 32 + "@a/b"),
        ("sequences", MAX_SEQUENCES + 1),
        ("timeout_s", math.nan),
        ("pool", "A"),
    ],
)
def test_what_is_refused_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        queued_request(enqueue(**{field: value}), ROUTER, now=0.0, enqueued_ns=0)
    assert [violation.field for violation in error.value.violations] == [field]


def test_a_request_has_its_pool_and_its_adapters_rank() -> None:
    plain = queued_request(enqueue(), ROUTER, now=0.0, enqueued_ns=0)
    assert (plain.pool, plain.adapter_rank) == ("default", 0)
    told = queued_request(enqueue(pool="small", adapter_rank=16), ROUTER, now=0.0, enqueued_ns=0)
    assert (told.pool, told.adapter_rank) == ("small", 16)


def test_time_left_becomes_a_deadline_and_for_ever_none() -> None:
    def deadline(**fields: float) -> float | None:
        return queued_request(enqueue(**fields), ROUTER, now=10.0, enqueued_ns=0).deadline

    assert deadline() is None
    assert deadline(timeout_s=2.5) == 12.5
    assert deadline(timeout_s=-3.0) == 10.0
    assert deadline(timeout_s=math.inf) is None


def test_a_class_that_is_not_known_counts_as_standard_and_no_choice_as_one() -> None:
    assert flow_key("acme", 99).qos_class is QosClass.STANDARD
    assert flow_key("acme", common_pb2.QOS_CLASS_UNSPECIFIED).qos_class is QosClass.STANDARD
    assert flow_key("acme", common_pb2.QOS_CLASS_BATCH).qos_class is QosClass.BATCH
    assert queued_request(enqueue(), ROUTER, now=0.0, enqueued_ns=0).sequences == 1


def test_an_adapter_on_a_tier_that_is_not_known_is_absent() -> None:
    message = worker_pb2.ControlReport(sequence_slots=4)
    for uid, tier in (("h", worker_pb2.ADAPTER_TIER_HOST), ("d", worker_pb2.ADAPTER_TIER_DEVICE), ("x", 77)):
        message.adapters.add(adapter_uid=uid, tier=tier)  # type: ignore[arg-type]
    assert list(worker_report(message).adapters.values()) == [Residency.HOST, Residency.DEVICE, Residency.ABSENT]


def test_a_flows_tokens_and_its_sequences_stand_apart() -> None:
    message = worker_pb2.ControlReport()
    message.flows.add(
        tenant_id="acme", qos_class=common_pb2.QOS_CLASS_BATCH, prompt_tokens=7, output_tokens=3,
        slotted_sequences=2, ready_sequences=1, held_sequences=4,
    )  # fmt: skip
    found = worker_report(message)
    key = flow_key("acme", common_pb2.QOS_CLASS_BATCH)
    assert found.flows[key] == (7, 3)
    assert (found.loads[key].slotted, found.loads[key].ready, found.loads[key].held) == (2, 1, 4)


def test_a_lease_without_tokens_is_unbounded() -> None:
    message = scheduler_pb2.HeldLease(request_id="r", tenant_id="acme", max_tokens=9)
    assert held_lease(message).tokens is None
    message.tokens = 0
    assert held_lease(message).tokens == 0
    with pytest.raises(InvalidRequest, match=r"hello\.leases\.tenant_id"):
        held_lease(scheduler_pb2.HeldLease(request_id="r", tenant_id="?"))


def test_a_limit_that_is_none_is_not_sent() -> None:
    view = OverloadView(5, math.inf, {TenantId("acme"): TenantView((1.0, 2.0, 3.0), 4, 0.5)})
    message = overload_message(view, "small").overload
    assert message.pool == "small"
    assert not message.HasField("limit_shares")
    assert not message.crowded
    assert overload_message(replace(view, is_crowded=True), "small").overload.crowded
    (tenant,) = message.tenants
    assert (tenant.limit_shares, tenant.batch_shares, tenant.level) == (0.5, 3.0, 4)


def test_what_routers_refused_is_by_flow() -> None:
    message = scheduler_pb2.Refused()
    message.flows.add(tenant_id="acme", qos_class=common_pb2.QOS_CLASS_BATCH, requests=3)
    assert refused_flows(message).flows == ((flow_key("acme", common_pb2.QOS_CLASS_BATCH), 3),)
    assert refused_flows(message).pool == "default"
    message.flows.add(tenant_id="no name")
    with pytest.raises(InvalidRequest):
        refused_flows(message)


def test_a_workers_memory_is_told_by_tenant_and_of_many_those_with_most() -> None:
    desk, told = Desk(), Told()
    desk.worker("w0", slots=1)
    (view,) = desk.core.workers
    told.take(
        worker_pb2.ControlReport(
            snapshot=True,
            kv_block_bytes=100,
            tenant_adapters=[status_pb2.TenantAdapters(tenant_id="t001", device_bytes=50)],
        )
    )
    status = worker_status(view, told, {TenantId("t000"): 2, TenantId("t001"): 3}, "small")
    assert status.pool == "small"
    assert status.kv_block_bytes == 100
    rows = [(each.tenant_id, each.kv_bytes, each.adapter_bytes) for each in status.tenants]
    assert rows == [("t001", 300, 50), ("t000", 200, 0)]
    many = {TenantId(f"t{i:03}"): i + 1 for i in range(MAX_WORKER_TENANTS + 10)}
    *named, others = worker_status(view, told, many, "small").tenants
    assert [each.tenant_id for each in named] == [f"t{i:03}" for i in reversed(range(10, MAX_WORKER_TENANTS + 10))]
    assert (others.tenant_id, others.kv_bytes, others.adapter_bytes) == ("", 100 * sum(range(1, 11)), 50)
