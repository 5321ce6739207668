"""The quotas before the core: who is admitted, what a lease holds, and what becomes of it. Virtual time, no network."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers import ROUTER, flow, request
from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    GrantClosed,
    HeldLease,
    LeaseWanted,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    SendGrant,
    SendLease,
    SendLeaseRefusal,
    SendRefusal,
    Settled,
    Tick,
    Withdrawn,
    WorkerJoined,
    WorkerReported,
)
from manylora_scheduler.core.reports import WorkerReport
from manylora_scheduler.gates.quota import ABSENCE_S, EXTENSION_WAIT_S, QuotaGate, QuotaView
from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy, TenantQuotas, TokenRate
from manylora_shared.tenancy.quota import QuotaLevel

ACME = TenantId("acme")


def policy(rate: int | None = None, burst: int = 0, **quotas: int) -> TenantPolicy:
    bucket = TokenRate(rate, burst) if rate else None
    return TenantPolicy(ACME, {c: ClassPolicy(1, bucket) for c in QosClass}, quotas=TenantQuotas(**quotas))


class Gate:
    """A gate over a real core with one roomy worker, at time 100 of a term that began at 0."""

    def __init__(self, tenant: TenantPolicy, *, began_at: float = 0.0, slots: int = 1000) -> None:
        self.gate = QuotaGate(Core(), began_at)
        self.now = 100.0
        self.do(RouterConnected(ROUTER, 1))
        self.do(WorkerJoined(WorkerId("w"), "w:1", "cpu", 100_000))
        report = WorkerReport(
            snapshot=True,
            sequence_slots=slots,
            running_sequences=0,
            kv_blocks_total=100_000,
            kv_blocks_free=100_000,
            block_size=16,
        )
        self.do(WorkerReported(WorkerId("w"), report))
        self.do(PolicyChanged(ACME, tenant))

    def do(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        commands = self.gate.apply(event, self.now)
        self.gate.authority.check_invariants()
        return commands

    def ask(self, name: str, prompt: int = 10, new: int = 10, **more: Any) -> SendRefusal | SendLease | None:
        """Enqueues. The refusal; or the lease, None where it is not bounded: then it was granted."""
        asked = request(name, prompt_tokens=prompt, max_new_tokens=new, **more)
        commands = self.do(Enqueued(1, asked))
        refusals = [c for c in commands if isinstance(c, SendRefusal)]
        if refusals:
            assert len(commands) == 1
            return refusals[0]
        assert any(isinstance(c, SendGrant) for c in commands)
        leases = [c for c in commands if isinstance(c, SendLease)]
        return leases[0] if leases else None

    def refused(self, name: str, **more: Any) -> SendRefusal:
        answer = self.ask(name, **more)
        assert isinstance(answer, SendRefusal), answer
        assert answer.code is Code.RESOURCE_EXHAUSTED
        return answer

    def leased(self, name: str, **more: Any) -> int:
        answer = self.ask(name, **more)
        assert isinstance(answer, SendLease), answer
        assert answer.tokens is not None
        return answer.tokens

    def settle(self, name: str, tokens: int) -> list[Command]:
        return self.do(Settled(ROUTER, RequestId(name), tokens))

    def want(self, name: str) -> list[Command]:
        return self.do(LeaseWanted(1, ROUTER, RequestId(name)))

    def view(self) -> QuotaView:
        found = [v for v in self.gate.authority.views(self.now) if v.flow == flow()]
        return found[0]


def test_without_quotas_nothing_is_bounded_and_all_is_counted() -> None:
    gate = Gate(policy())
    assert gate.ask("a") is None
    assert gate.ask("b") is None
    gate.settle("a", 17)
    assert dataclasses.asdict(gate.view()) | {"flow": None} == {
        "flow": None,
        "requests": 1,
        "leased_tokens": 0,
        "settled_tokens": 17,
        "level_tokens": None,
    }


def test_tokens_are_debited_at_once_and_the_rest_comes_back() -> None:
    gate = Gate(policy(10, 100))
    assert gate.leased("a", prompt=30, new=20) == 46  # the prompt and a slice
    assert gate.view().level_tokens == 54
    refusal = gate.refused("b", prompt=60, new=20)
    assert refusal.retry_after_s == pytest.approx((76 - 54) / 10)
    assert [b.quota for b in refusal.breaches] == ["classes.standard.token_bucket"]
    assert (refusal.breaches[0].limit, refusal.breaches[0].capacity) == (10, 100)
    assert gate.view().level_tokens == 54, "a refused request costs nothing"
    gate.settle("a", 32)
    assert (gate.view().level_tokens, gate.view().settled_tokens) == (68, 32)
    gate.settle("a", 32)
    assert (gate.view().level_tokens, gate.view().settled_tokens) == (68, 32)
    gate.do(Tick(), 0.8)
    assert gate.leased("b", prompt=60, new=20) == 76


def test_the_hint_is_exact() -> None:
    gate = Gate(policy(7, 100))
    gate.leased("a", prompt=84, new=20)
    wait_s = gate.refused("b", prompt=5, new=20).retry_after_s
    assert wait_s is not None
    gate.do(Tick(), wait_s - 0.002)
    gate.refused("c", prompt=5, new=20)
    gate.do(Tick(), 0.002)
    gate.leased("d", prompt=5, new=20)


def test_what_can_never_fit_has_no_hint() -> None:
    gate = Gate(policy(10, 100, requests_per_s=1))
    refusal = gate.refused("a", prompt=100, new=5)
    assert refusal.retry_after_s is None
    assert "burst_tps, 100" in refusal.message
    assert gate.leased("b", prompt=99, new=500) == 100


def test_the_first_lease_tells_what_is_left() -> None:
    gate = Gate(policy(10, 100, requests_per_s=2, requests_burst=3))
    first = gate.ask("a", prompt=20, new=500)
    assert isinstance(first, SendLease)
    assert first.tokens is not None
    requests, tokens = first.levels
    assert requests == QuotaLevel("quotas.requests_per_s", 3, 2, 0.5)
    left = 100 - first.tokens
    assert tokens == QuotaLevel("classes.standard.token_bucket", 100, left, first.tokens / 10)
    gate.do(Tick(), 60.0)
    [again] = [each for each in gate.want("a") if isinstance(each, SendLease)]
    assert again.levels == ()


def test_requests_a_second() -> None:
    gate = Gate(policy(requests_per_s=2, requests_burst=3))
    for name in "abc":
        gate.ask(name)
    refusal = gate.refused("d")
    assert ([b.quota for b in refusal.breaches], refusal.retry_after_s) == (["quotas.requests_per_s"], 0.5)
    assert (refusal.breaches[0].limit, refusal.breaches[0].capacity) == (2, 3)
    assert refusal.message == "quotas.requests_per_s: no more than 2 requests a second are admitted, 3 at once"
    gate.do(Tick(), 0.5)
    assert isinstance(gate.ask("d"), SendLease)
    gate.refused("e")


def test_concurrency_and_queue_caps() -> None:
    gate = Gate(policy(concurrency=2))
    gate.ask("a")
    gate.ask("b")
    refusal = gate.refused("c")
    assert ([b.quota for b in refusal.breaches], refusal.breaches[0].limit) == (["quotas.concurrency"], 2)
    assert refusal.retry_after_s is not None
    gate.settle("a", 5)
    gate.ask("c")
    assert gate.ask("other", tenant="other") is None
    full = Gate(policy(max_queued=1), slots=1)
    full.ask("a")
    full.do(Enqueued(1, request("b")))
    assert [b.quota for b in full.refused("c").breaches] == ["quotas.max_queued"]
    full.do(Withdrawn(1, RequestId("b")))
    full.settle("b", 0)
    assert not any(isinstance(c, SendRefusal) for c in full.do(Enqueued(1, request("c"))))


def test_a_keys_own_limits_stand_below_its_tenants() -> None:
    limits = KeyLimits("k1", requests_per_min=5, tokens_per_min=100, concurrency=2)
    gate = Gate(policy(concurrency=3))
    gate.ask("a", limits=limits)
    gate.ask("b", limits=limits)
    refusal = gate.refused("c", limits=limits)
    assert [b.quota for b in refusal.breaches] == ["key.concurrency"]
    assert refusal.message == "key.concurrency: 2 requests of key k1 run or wait already"
    gate.ask("c")  # another key of the tenant
    assert [b.quota for b in gate.refused("d", limits=limits).breaches] == ["key.concurrency", "quotas.concurrency"]
    gate.settle("a", 5)
    gate.settle("c", 5)
    refusal = gate.refused("d", new=90, limits=limits)
    assert [b.quota for b in refusal.breaches] == ["key.tokens_per_min"]
    assert refusal.breaches[0].description == "100 tokens may be used, and key k1 has 75 of 100 a minute left"
    assert refusal.retry_after_s == 15.0
    assert gate.refused("d", new=91, limits=limits).retry_after_s is None, "it can never fit"
    gate.ask("d", limits=limits)
    gate.do(RouterDisconnected(ROUTER, 1))
    gate.do(Tick(), ABSENCE_S + 1)
    gate.do(RouterConnected(ROUTER, 1))
    gate.ask("e", limits=limits)  # those of the router that was gone are written off


def test_a_key_of_a_tenant_without_quotas_has_its_limits() -> None:
    gate = Gate(policy())
    limits = KeyLimits("k1", requests_per_min=1)
    assert gate.ask("a", tenant="other", limits=limits) is None
    assert [b.quota for b in gate.refused("b", tenant="other", limits=limits).breaches] == ["key.requests_per_min"]
    assert gate.ask("c", tenant="other") is None


def test_all_quotas_at_fault_are_named() -> None:
    gate = Gate(policy(10, 100, concurrency=1, requests_per_s=1))
    gate.leased("a", prompt=90, new=1)
    refusal = gate.refused("b", prompt=50, new=1)
    assert [b.quota for b in refusal.breaches] == [
        "quotas.concurrency",
        "quotas.requests_per_s",
        "classes.standard.token_bucket",
    ]
    assert refusal.retry_after_s == pytest.approx(4.2)


def test_a_lease_grows_to_what_was_asked_for_and_no_further() -> None:
    gate = Gate(policy(400, 1000))
    assert gate.leased("a", prompt=10, new=250) == 110
    assert gate.want("a") == [SendLease(ROUTER, 1, RequestId("a"), 210)]
    assert gate.want("a") == [SendLease(ROUTER, 1, RequestId("a"), 260)]
    level = gate.view().level_tokens
    assert gate.want("a") == [SendLease(ROUTER, 1, RequestId("a"), 260)]
    assert gate.view().level_tokens == level


def test_an_extension_waits_for_tokens_and_new_requests_wait_behind_it() -> None:
    gate = Gate(policy(100, 100))
    gate.leased("a", prompt=60, new=200)
    gate.leased("b", prompt=10, new=5)
    assert gate.view().level_tokens == 0
    assert gate.want("a") == []
    assert gate.want("a") == []
    assert gate.refused("c", prompt=1, new=1).retry_after_s == pytest.approx(0.27)
    wake = gate.gate.next_wakeup()
    assert wake == pytest.approx(100.25)
    assert gate.do(Tick(), 0.2501) == [SendLease(ROUTER, 1, RequestId("a"), 110)]


def test_an_extension_that_waits_too_long_is_refused() -> None:
    gate = Gate(policy(1, 30))
    gate.leased("a", prompt=10, new=200)
    gate.leased("b", prompt=1, new=3)
    assert gate.want("a") == []
    (refusal,) = gate.do(Tick(), EXTENSION_WAIT_S)
    assert isinstance(refusal, SendLeaseRefusal)
    assert refusal.retry_after_s is not None
    assert [b.quota for b in refusal.breaches] == ["classes.standard.token_bucket"]
    gate.settle("a", 26)
    assert gate.view().settled_tokens == 26


def test_what_the_core_refuses_costs_nothing() -> None:
    gate = Gate(policy(10, 100))
    late = request("a", prompt_tokens=20, max_new_tokens=20, deadline=99.0)
    commands = gate.do(Enqueued(1, late))
    assert [type(c) for c in commands] == [SendLease, SendRefusal]
    assert (gate.view().level_tokens, gate.view().requests) == (100, 0)


def test_an_attempt_that_did_not_reach_its_worker_keeps_its_lease() -> None:
    gate = Gate(policy(10, 100))
    gate.leased("a", prompt=20, new=20)
    gate.do(GrantClosed(1, ROUTER, RequestId("a"), WorkerId("w"), False))
    level = gate.view().level_tokens
    gate.do(Enqueued(1, request("a", prompt_tokens=20, max_new_tokens=20)))
    assert (gate.view().level_tokens, gate.view().requests) == (level, 1)


def test_another_routers_request_id_touches_no_lease() -> None:
    gate = Gate(policy(10, 100))
    gate.leased("a", prompt=20, new=20)
    gate.do(RouterConnected(RouterId("other"), 2))
    (refusal,) = gate.do(Enqueued(2, request("a", router="other")))
    assert isinstance(refusal, SendRefusal)
    assert refusal.code is Code.ALREADY_EXISTS
    gate.do(Settled(RouterId("other"), RequestId("a"), 0))
    (stranger,) = gate.do(LeaseWanted(2, RouterId("other"), RequestId("a")))
    assert isinstance(stranger, SendLeaseRefusal)
    assert gate.view().requests == 1


def test_a_policy_changes_live() -> None:
    gate = Gate(policy(10, 100))
    gate.leased("a", prompt=84, new=16)
    gate.refused("b", prompt=10, new=10)
    gate.do(PolicyChanged(ACME, policy(1000, 5000)))
    assert gate.view().level_tokens == 0
    gate.do(Tick(), 0.1)
    gate.leased("b", prompt=10, new=10)
    gate.want("a")
    gate.do(PolicyChanged(ACME, policy(concurrency=3)))
    assert gate.view().level_tokens is None
    gate.settle("a", 90)
    gate.settle("b", 20)
    assert gate.view().settled_tokens == 110
    gate.do(PolicyChanged(ACME, None))
    assert gate.gate.authority.views(gate.now) == []


def test_a_new_leader_begins_empty_and_takes_leases_over() -> None:
    gate = Gate(policy(10, 1000), began_at=99.0)
    gate.refused("a", prompt=20, new=1)
    assert gate.view().level_tokens == 10
    held = (HeldLease(RequestId("old"), flow(), 60, 200), HeldLease(RequestId("free"), flow(), None, 50))
    gate.do(RouterConnected(ROUTER, 2, held))
    assert (gate.view().requests, gate.view().leased_tokens, gate.view().level_tokens) == (2, 60, 10)
    gate.settle("old", 40)
    assert (gate.view().settled_tokens, gate.view().level_tokens) == (40, 10)


def test_leases_of_a_router_that_is_gone_are_written_off() -> None:
    gate = Gate(policy(10, 100, concurrency=1))
    gate.leased("a", prompt=20, new=20)
    gate.do(RouterDisconnected(ROUTER, 1))
    gate.do(Tick(), ABSENCE_S - 0.1)
    assert gate.gate.authority.num_leases == 1
    gate.do(Tick(), 0.2)
    assert gate.gate.authority.num_leases == 0
    back = Gate(policy(10, 100))
    back.leased("a", prompt=20, new=20)
    back.do(RouterDisconnected(ROUTER, 1))
    back.do(RouterConnected(ROUTER, 2, (HeldLease(RequestId("a"), flow(), 36, 40),)), 1.0)
    back.do(Tick(), 2 * ABSENCE_S)
    assert back.gate.authority.num_leases == 1
    back.do(RouterConnected(ROUTER, 3))
    assert back.gate.authority.num_leases == 0


def test_taking_a_quota_away_and_giving_it_back_gives_no_burst() -> None:
    gate = Gate(policy(10, 100))
    gate.leased("a", prompt=84, new=16)
    gate.do(PolicyChanged(ACME, policy()))
    gate.do(PolicyChanged(ACME, policy(10, 100)), 1.0)
    assert gate.view().level_tokens == 10


def test_an_answer_that_is_resumed_keeps_its_lease_and_settles_once() -> None:
    gate = Gate(policy(10, 100))
    assert gate.leased("a", prompt=30, new=20) == 46
    gate.do(GrantClosed(1, ROUTER, RequestId("a"), WorkerId("w"), reached_worker=False, is_unavailable=True))
    again = request("a", prompt_tokens=35, max_new_tokens=15, is_resumed=True)
    leases = [c.tokens for c in gate.do(Enqueued(1, again)) if isinstance(c, SendLease)]
    assert (leases, gate.view().level_tokens) == ([46], 54), "nothing is debited again"
    gate.settle("a", 44)
    assert (gate.view().level_tokens, gate.view().settled_tokens) == (56, 44)


def test_a_refusal_of_what_is_resumed_leaves_its_use_to_be_settled() -> None:
    gate = Gate(policy(10, 100))
    gate.leased("a", prompt=30, new=20)
    gate.do(GrantClosed(1, ROUTER, RequestId("a"), WorkerId("w"), reached_worker=False, is_unavailable=True))
    late = request("a", prompt_tokens=35, max_new_tokens=15, deadline=gate.now, is_resumed=True)
    assert [type(c) for c in gate.do(Enqueued(1, late)) if not isinstance(c, SendLease)] == [SendRefusal]
    assert gate.view().settled_tokens == 0
    gate.settle("a", 33)
    assert (gate.view().requests, gate.view().settled_tokens) == (0, 33)
