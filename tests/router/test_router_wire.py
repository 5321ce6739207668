"""Between protobuf messages and the router's plain data."""

from __future__ import annotations

import math

from manylora.v1 import admin_pb2, common_pb2, scheduler_pb2
from manylora_router.guard.circuits import CircuitState
from manylora_router.links.wire import (
    circuit_status,
    flow_counts,
    grant_of,
    held_lease,
    overload_view,
    refusal_of,
    slo_counts,
)
from manylora_shared.errors import Code, Overloaded, QuotaExceeded
from manylora_shared.ids import AdapterUid, QosClass, TenantId
from manylora_shared.tenancy.slo import FlowCounts


def test_a_cap_of_zero_is_a_cap_and_none_is_none() -> None:
    assert grant_of(scheduler_pb2.Grant(worker_id="w")).max_output_tokens is None
    assert grant_of(scheduler_pb2.Grant(max_output_tokens=0, overload_level=9)).max_output_tokens == 0


def test_refusals_are_the_errors_that_callers_know() -> None:
    breach = scheduler_pb2.QuotaBreach(quota="q", tenant_id="acme", limit=5, description="d")
    quota = refusal_of(scheduler_pb2.Refusal(code=8, message="m", retry_after_s=2.0, breaches=[breach]))
    assert isinstance(quota, QuotaExceeded)
    assert (quota.retry_after_s, quota.breaches[0].limit) == (2.0, 5)
    assert isinstance(refusal_of(scheduler_pb2.Refusal(code=int(Code.RESOURCE_EXHAUSTED))), Overloaded)
    other = refusal_of(scheduler_pb2.Refusal(code=int(Code.DEADLINE_EXCEEDED), message="m"))
    assert (other.code, other.message, other.retry_after_s) == (Code.DEADLINE_EXCEEDED, "m", None)
    for code in (0, 999):
        assert refusal_of(scheduler_pb2.Refusal(code=code)).code is Code.UNKNOWN, "never OK"


def test_a_limit_that_is_not_told_is_none() -> None:
    message = scheduler_pb2.Overload(level=40)
    message.tenants.add(tenant_id="acme", level=3, interactive_shares=1, standard_shares=2, batch_shares=4)
    view = overload_view(message)
    assert (view.level, view.limit) == (40, math.inf)
    assert view.tenants[TenantId("acme")].tops == (1, 2, 4)
    assert view.tenants[TenantId("acme")].limit == math.inf
    assert overload_view(scheduler_pb2.Overload(limit_shares=0.5)).limit == 0.5


def test_a_lease_is_told_with_the_most_that_its_request_may_take() -> None:
    request = scheduler_pb2.Enqueue(request_id="r", tenant_id="acme", prompt_tokens=5, max_new_tokens=30)
    assert held_lease(request, 7).max_tokens == 35
    assert held_lease(request, 7).tokens == 7
    assert not held_lease(request, None).HasField("tokens")


def test_counts_of_service_levels_come_back_as_they_went() -> None:
    flow = TenantId("acme"), QosClass.BATCH
    counts = FlowCounts(3, 1, 2, 1, {4: 2}, {5: 1})
    assert flow_counts(slo_counts(flow, counts)) == (flow, counts)
    assert flow_counts(admin_pb2.SloCounts(qos_class=common_pb2.QOS_CLASS_UNSPECIFIED)) is None


def test_a_circuit_is_of_a_tenant_or_of_one_adapter() -> None:
    whole = circuit_status(CircuitState((TenantId("acme"),), is_half_open=False, retry_after_s=1.0, openings=2), "r0")
    assert (whole.whole_tenant, whole.adapter_version, whole.router_id) == (True, "", "r0")
    one = CircuitState((TenantId("acme"), AdapterUid("ab")), is_half_open=True, retry_after_s=0.0, openings=1)
    assert circuit_status(one, "r0").adapter_version == "ab"
    base = CircuitState((TenantId("acme"), None), is_half_open=True, retry_after_s=0.0, openings=1)
    assert (circuit_status(base, "r0").whole_tenant, circuit_status(base, "r0").adapter_version) == (False, "")
