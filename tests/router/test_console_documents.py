"""The documents of the console's pages: bounded, whatever there is."""

from __future__ import annotations

from manylora.v1 import admin_pb2, common_pb2, status_pb2
from manylora_router.front.http.console import documents
from manylora_router.history.adapter_use import AdapterUses
from manylora_router.history.lives import Life
from manylora_router.history.samples import Samples
from manylora_shared.coordination.records import AdapterRecord


def test_a_message_becomes_plain_numbers_words_and_nulls() -> None:
    message = admin_pb2.GetStatusResponse(
        slos=[admin_pb2.SloStatus(tenant_id="a", qos_class=common_pb2.QOS_CLASS_INTERACTIVE, requests=1 << 60)],
        slo_counts=[admin_pb2.SloCounts(ttft={3: 4})],
        scheduler=admin_pb2.SchedulerStatus(reachable=True),
    )
    told = documents.plain(message)
    (slo,) = told["slos"]
    assert (slo["qos_class"], slo["requests"], slo["ttft_p95_ms"]) == ("interactive", 1 << 60, None)
    assert told["slo_counts"][0]["ttft"] == {3: 4}
    assert told["scheduler"]["reachable"] is True
    assert told["scheduler"]["etcd"] is None
    assert documents.plain(admin_pb2.FlowStatus())["qos_class"] == "", "no class has no name"


def test_of_many_tenants_the_busiest_are_told_in_every_list() -> None:
    many = documents.MAX_TENANTS + 50
    status = admin_pb2.GetStatusResponse(
        scheduler=admin_pb2.SchedulerStatus(
            flows=[admin_pb2.FlowStatus(tenant_id=f"t{i:04}", running=1, served_cost=i) for i in range(many)],
            kv=[admin_pb2.TenantKv(tenant_id=f"t{i:04}") for i in range(many)],
            setbacks=[status_pb2.TenantSetbacks(tenant_id=f"t{i:04}") for i in range(many)],
        )
    )
    told = documents.status_document(status)
    assert told["left_out"] == 50
    for name in ("flows", "kv", "setbacks"):
        assert [row["tenant_id"] for row in told["scheduler"][name]] == [f"t{i:04}" for i in range(50, many)]
    assert len(status.scheduler.flows) == many, "the answer of the moment is others', too"


def test_adapters_are_bounded_and_those_in_use_come_first() -> None:
    uses = AdapterUses()
    uses.used("acme", "a0900@1", found="device", waited_ms=0.0, now=5.0)
    uses.used("acme", "gone@1", found="device", waited_ms=0.0, now=6.0)
    records = {f"acme/a{i:04}": AdapterRecord("acme", f"a{i:04}", "a" * 64, 8, 1, (), 1.0) for i in range(1000)}
    told = documents.adapters_document(records, uses, "acme", lambda at: at + 100.0)
    assert (len(told["adapters"]), told["left_out"]) == (documents.MAX_ADAPTERS, 1000 - documents.MAX_ADAPTERS)
    first = told["adapters"][0]
    assert (first["name"], first["versions"][0]["use"]["used_unix_s"]) == ("a0900", 105.0)
    assert told["adapters"][1]["versions"][0]["use"] is None


def test_a_version_that_the_gate_refused_says_so() -> None:
    record = AdapterRecord("acme", "a", "a" * 64, 8, 1, (), 1.0, state="rejected")
    told = documents.adapters_document({"acme/a": record}, AdapterUses(), "acme", lambda at: at)
    assert [each["state"] for each in told["adapters"][0]["versions"]] == ["rejected"]


def test_a_life_is_told_in_milliseconds_since_it_came() -> None:
    life = Life("r", "acme", "batch", 10.0, admitted_at=10.5, ended_at=12.0, outcome="completed", swaps=3)
    told = documents.life_document(life, lambda at: at + 1000.0, 13.0, is_operator=True)
    assert (told["admitted_ms"], told["granted_ms"], told["ended_ms"], told["age_ms"]) == (500.0, None, 2000.0, 3000.0)
    assert (told["arrived_unix_s"], told["swaps"]) == (1010.0, 3)
    hidden = documents.life_document(life, lambda at: at, 13.0, is_operator=False)
    assert (hidden["swaps"], hidden["evictions"]) == (None, None)


def test_so_many_lives_and_series_are_told() -> None:
    lives = (Life(str(i), "acme", "", 0.0) for i in range(5000))
    told = documents.lives_document(lives, lambda at: at, 1.0, is_operator=False)
    assert len(told["requests"]) == documents.MAX_LIVES
    samples = Samples()
    for number in range(40):
        samples.tokens_came(f"t{number}", number + 1)
    samples.close_step({}, 10.0)
    history = documents.history_document(samples, "", lambda at: at + 1.0)
    assert [each["tenant"] for each in history["tenants"]] == [f"t{n}" for n in range(39, 31, -1)]
    assert history["series"]["completion_tokens"] == [40 * 41 // 2]
    assert (history["began_unix_s"], history["ended_unix_s"]) == (1.0, 11.0)
