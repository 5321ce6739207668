"""An admitted request, and what overload takes from it."""

from __future__ import annotations

from manylora_router.guard.admission import Adapter
from manylora_router.links.wire import Grant
from manylora_router.request.frames import Degraded
from manylora_router.request.job import Job
from manylora_shared.adapter_reference import AdapterPart
from manylora_shared.ids import AdapterName, AdapterUid, QosClass, TenantId
from manylora_shared.sampling import Sampling
from manylora_shared.telemetry import Attribute


def job(adapter: Adapter | None = None) -> Job:
    return Job(
        request_id="r",
        tenant_id=TenantId("acme"),
        qos_class=QosClass.BATCH,
        priority=0,
        adapter=adapter,
        prompt_token_ids=(1, 2, 3),
        max_tokens=100,
        n=2,
        sampling=Sampling(seed=1),
        stop=None,
        stop_tokens={},
        stop_token_ids=(),
        bad_sequences=(),
        received_at=0.0,
        deadline=None,
        traceparent="",
    )


def grant(cap: int | None, level: int = 0) -> Grant:
    return Grant("w0", "w0:1", 1, 0.0, max_output_tokens=cap, overload_level=level)


def test_a_cap_is_of_each_choice_and_lowers_alone() -> None:
    asked = job()
    assert asked.most_tokens == 203
    for cap in (None, 100, 200):
        assert asked.as_granted(grant(cap)) is asked
    lowered = asked.as_granted(grant(40, level=70))
    assert (lowered.max_tokens, lowered.most_tokens) == (40, 83)
    assert lowered.degraded == Degraded(max_tokens=40, asked_max_tokens=100, overload_level=70)


def test_a_second_grant_remembers_what_was_asked_for() -> None:
    lowered = job().as_granted(grant(40)).as_granted(grant(10, level=90))
    assert lowered.degraded == Degraded(max_tokens=10, asked_max_tokens=100, overload_level=90)


def test_traces_name_its_adapter_where_it_has_one() -> None:
    named = job(Adapter("up", AdapterUid("ab@acme"), (AdapterPart(AdapterName("up"), 1),))).attributes()
    assert (named[Attribute.ADAPTER_ID], named[Attribute.ADAPTER_VERSION]) == ("up", "ab")
    plain = job().attributes()
    assert plain[Attribute.TENANT_ID] == "acme"
    assert not plain.get(Attribute.ADAPTER_ID)
