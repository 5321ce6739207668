"""Token accounts against exact arithmetic, mutants that the checks must catch, and the authority over many routers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.core.events import Command, HeldLease, SendLease, SendLeaseRefusal
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.gates.quota import QuotaAuthority
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId
from manylora_shared.tenancy import quota
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy, TokenRate
from manylora_shared.tenancy.quota import FlowAccount

from tests.properties import quota_suite as suite

NUM_SEEDS = 300


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 120))
def test_any_history_keeps_the_account_exact(seed: int, num_actions: int) -> None:
    suite.Oracle(FlowAccount, seed).run(num_actions)


def test_the_whole_suite() -> None:
    suite.run_suite(FlowAccount, range(NUM_SEEDS))


class LeaseNotDebited(FlowAccount[int]):
    def _debit(self, tokens: int, now_ns: int) -> None:
        pass


class RefundTwice(FlowAccount[int]):
    def settle(self, key: int, used: int, now_ns: int) -> None:
        lease = self._leases[key]
        super().settle(key, used, now_ns)
        if self.bucket is not None and lease.tokens is not None and used < lease.tokens:
            self.bucket.give_back(min(lease.tokens - used, lease.own_tokens), now_ns)


class RefundForgotten(FlowAccount[int]):
    def settle(self, key: int, used: int, now_ns: int) -> None:
        self.settled_tokens += used
        self._end(key)


class RefundOfTheWholeLease(FlowAccount[int]):
    def settle(self, key: int, used: int, now_ns: int) -> None:
        super().settle(key, 0, now_ns)
        self.settled_tokens += used


class RefundOfAnothersTokens(FlowAccount[int]):
    def take_over(self, key: int, tokens: int | None) -> None:
        self._leases[key] = quota._Lease(tokens, tokens or 0)


class WrittenOffComesBack(FlowAccount[int]):
    def write_off(self, key: int) -> None:
        lease = self._end(key)
        if self.bucket is not None and lease.tokens is not None:
            self.bucket._level_nanos += lease.tokens * quota.NANOS


class NewLeasesBeforeExtensions(FlowAccount[int]):
    @property
    def pending_tokens(self) -> int:
        return 0


class HintTooEarly(FlowAccount[int]):
    def wait_ns(self, tokens: int, now_ns: int) -> int | None:
        wait_ns = super().wait_ns(tokens, now_ns)
        return max(0, wait_ns - 1) if wait_ns else wait_ns


MUTANTS = [
    LeaseNotDebited,
    RefundTwice,
    RefundForgotten,
    RefundOfTheWholeLease,
    RefundOfAnothersTokens,
    WrittenOffComesBack,
    NewLeasesBeforeExtensions,
    HintTooEarly,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_suite_notices(mutant: type[FlowAccount[int]]) -> None:
    with pytest.raises(AssertionError):
        suite.run_suite(mutant, range(NUM_SEEDS))


# ---- many routers, leaders that change, partitions

FLOW = FlowKey(TenantId("acme"), QosClass.STANDARD)
STEP_S = 0.01
TOKEN_S = 0.005
"""A stream makes a token in so long."""


@dataclass
class Stream:
    request_id: RequestId
    prompt_tokens: int
    max_new_tokens: int
    length: int
    """What it will really make."""
    tokens: int
    """Its lease."""
    used: int = 0
    wanted: bool = False
    ended: bool = False


@dataclass
class Router:
    router_id: RouterId
    cut_until: float = 0.0
    session: int = 0
    is_connected: bool = False
    retry_at: float = 0.0
    streams: dict[RequestId, Stream] = field(default_factory=dict)
    unsettled: list[Stream] = field(default_factory=list)


class Play:
    """Routers as the product's behave, in steps of virtual time, over authorities that come and go.

    Demand is about twice the contract. Every leader's authority dies without a word, and for a while there is none.
    """

    def __init__(self, seed: int, *, rate: int = 2000, burst: int = 2000, routers: int = 8) -> None:
        self.rng = random.Random(seed)
        self.rate, self.burst = rate, burst
        self.policy = TenantPolicy(FLOW.tenant_id, {c: ClassPolicy(1, TokenRate(rate, burst)) for c in QosClass})
        self.now = 100.0
        self.routers = [Router(RouterId(f"r{i}")) for i in range(routers)]
        self.authority: QuotaAuthority | None = None
        self.began_at = self.now
        self.used_at: list[tuple[float, int, int]] = []
        """(moment, tokens used so far, tokens leased and unused)."""
        self.used = 0
        self.settled = 0
        self.cut = 0
        self.next_id = 0

    def lead(self) -> None:
        self.authority = QuotaAuthority(self.now)
        self.authority.set_policy(FLOW.tenant_id, self.policy, self.now)

    def fall(self) -> None:
        self.authority = None
        for router in self.routers:
            router.is_connected = False

    def run(self, seconds: float, *, faults: bool) -> None:
        self.lead()
        next_fall = self.now + 30.0
        up_again = 0.0
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            if faults and self.authority is not None and self.now >= next_fall:
                self.fall()
                up_again, next_fall = self.now + 0.5, self.now + 30.0
            if self.authority is None and self.now >= up_again:
                self.lead()
            for router in self.routers:
                if faults and self.rng.random() < STEP_S / 40 and router.cut_until < self.now:
                    self.cut_off(router)
                self.step(router)
            if self.authority is not None:
                self.deliver(self.authority.tick(self.now))
                self.authority.check_invariants()
            leased = sum(s.tokens - s.used for r in self.routers for s in r.streams.values())
            self.used_at.append((self.now, self.used, leased))

    def cut_off(self, router: Router) -> None:
        router.cut_until = self.now + 3.0
        router.is_connected = False
        if self.authority is not None:
            self.authority.router_disconnected(router.router_id, router.session, self.now)

    def step(self, router: Router) -> None:
        authority = self.authority
        if authority is not None and not router.is_connected and router.cut_until <= self.now:
            router.is_connected = True
            router.session += 1
            held = [
                HeldLease(s.request_id, FLOW, s.tokens, s.prompt_tokens + s.max_new_tokens)
                for s in [*router.streams.values(), *router.unsettled]
            ]
            authority.router_connected(router.router_id, router.session, held)
            for stream in router.streams.values():
                stream.wanted = False
        connected = authority is not None and router.is_connected
        for stream in list(router.streams.values()):
            self.advance(router, stream)
        if authority is None or not connected:
            return
        for stream in router.unsettled:
            self.deliver(authority.settle(router.router_id, stream.request_id, stream.used, self.now))
        router.unsettled.clear()
        for stream in list(router.streams.values()):
            if not stream.wanted and stream.tokens - stream.used < 16 and stream.used < stream.length:
                stream.wanted = True
                self.deliver(authority.want_more(router.router_id, router.session, stream.request_id, self.now))
        self.ask(router, authority)

    def advance(self, router: Router, stream: Stream) -> None:
        made = min(round(STEP_S / TOKEN_S), stream.length - stream.used, stream.tokens - stream.used)
        stream.used += made
        self.used += made
        if stream.used == stream.length:
            self.end(router, stream)

    def end(self, router: Router, stream: Stream) -> None:
        del router.streams[stream.request_id]
        router.unsettled.append(stream)
        self.settled += stream.used

    def ask(self, router: Router, authority: QuotaAuthority) -> None:
        """Skewed demand: the first routers ask far more than the last."""
        share = 1.0 / (1 + self.routers.index(router))
        wanted = 2.0 * self.rate / 110 * share / sum(1.0 / (1 + i) for i in range(len(self.routers)))
        if self.now < router.retry_at or self.rng.random() >= min(1.0, 3 * wanted * STEP_S):
            return
        prompt, most = self.rng.randint(1, 80), self.rng.randint(1, 200)
        length = self.rng.randint(1, most)
        request_id = RequestId(f"q{self.next_id}")
        self.next_id += 1
        request = QueuedRequest(
            request_id=request_id,
            router_id=router.router_id,
            flow=FLOW,
            prompt_tokens=prompt,
            max_new_tokens=most,
            sequences=1,
        )
        refusal = authority.admit(request, self.now)
        if refusal is not None:
            assert refusal.retry_after_s is not None
            router.retry_at = self.now + refusal.retry_after_s
            return
        authority.granted(request)
        (command,) = authority.lease_command(request, router.session, self.now)
        assert isinstance(command, SendLease)
        assert command.tokens is not None
        stream = Stream(request_id, prompt, most, prompt + length, command.tokens, used=prompt)
        self.used += prompt
        router.streams[request_id] = stream

    def deliver(self, commands: Sequence[Command]) -> None:
        for command in commands:
            assert isinstance(command, SendLease | SendLeaseRefusal)
            router = next(r for r in self.routers if r.router_id == command.router_id)
            stream = router.streams.get(command.request_id)
            if stream is None or not router.is_connected:
                continue
            stream.wanted = False
            if isinstance(command, SendLease):
                assert command.tokens is not None
                stream.tokens = command.tokens
            elif isinstance(command, SendLeaseRefusal) and stream.used == stream.tokens:
                self.cut += 1
                self.end(router, stream)

    def worst_window_overshoot(self) -> float:
        """The most that any window used beyond burst + rate * w, and beyond what was leased when it began."""
        worst, least = float("-inf"), float("inf")
        for moment, used, leased in self.used_at:
            least = min(least, used - self.rate * moment + leased)
            worst = max(worst, used - self.rate * moment - least)
        return worst - self.burst


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_eight_routers_never_use_more_than_the_contract(seed: int) -> None:
    play = Play(seed)
    play.run(90.0, faults=True)
    for moment, used, leased in play.used_at:
        assert used + leased <= play.burst + play.rate * (moment - play.began_at) + 1e-6
    assert play.worst_window_overshoot() <= 0
    outstanding = max(leased for _, _, leased in play.used_at)
    print(f"most tokens leased and unused at a time: {outstanding} of {play.rate}/s; streams cut: {play.cut}")


@pytest.mark.long
def test_the_contract_is_used_up() -> None:
    """Demand of twice the contract: at least 97 % of it is used, where leaders and routers fail too."""
    for faults in (False, True):
        play = Play(1)
        play.run(120.0, faults=faults)
        share = play.used / (play.rate * (play.now - play.began_at))
        print(f"faults {faults}: {share:.4f} of the contract used, {play.cut} streams cut, {play.next_id} asked")
        assert share >= 0.97


def test_what_is_settled_is_what_was_used() -> None:
    play = Play(3)
    play.run(20.0, faults=False)
    authority = play.authority
    assert authority is not None
    for router in play.routers:
        for stream in list(router.streams.values()):
            play.end(router, stream)
        play.step(router)
    (view,) = [v for v in authority.views(play.now) if v.settled_tokens]
    assert view.settled_tokens == play.settled
    assert sum(len(r.streams) for r in play.routers) == view.requests
