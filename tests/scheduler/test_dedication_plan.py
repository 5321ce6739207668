"""Dedicated workers: who becomes whose, and what the core grants to them."""

from __future__ import annotations

from manylora_scheduler.core.events import SendDedicate, SendRefusal, WorkerDedicated, WorkerLeft
from manylora_scheduler.core.reports import TO_EVERYBODY, Owner, Residency, ToldOwner
from manylora_scheduler.gates.dedication_plan import LONELY_S, RETRY_S, SETTLE_S, Change, DedicationPlan, advice
from manylora_scheduler.gates.recent_use import PoolUse
from manylora_shared.ids import AdapterUid, TenantId, WorkerId

from tests.scheduler.helpers import Desk, grants, started

ONE, TWO = Owner(AdapterUid("one"), TenantId("acme")), Owner(AdapterUid("two"), TenantId("beta"))


class Pool:
    """A core, its plan, and workers that obey at once."""

    def __init__(self, *workers: str, **what: object) -> None:
        self.desk, self.plan = Desk(), DedicationPlan(0.0)
        for worker_id in workers:
            self.desk.worker(worker_id, owner=TO_EVERYBODY, **what)

    def look(self, wanted: dict[Owner, int], seconds: float = 1.0) -> list[Change]:
        self.desk.now += seconds
        return self.plan.look(wanted, self.desk.core.workers, self.desk.now)

    def settle(self, wanted: dict[Owner, int], looks: int = 12) -> None:
        for _ in range(looks):
            for change in self.look(wanted):
                self.desk.apply(WorkerDedicated(change.worker_id, change.owner))
                self.tell(change.worker_id, ToldOwner(change.owner, False))
                self.tell(change.worker_id, ToldOwner(change.owner, True))

    def tell(self, worker_id: str, told: ToldOwner) -> None:
        self.desk.report(worker_id, owner=told)

    def owners(self) -> dict[str, Owner | None]:
        return {worker.worker_id: worker.owner for worker in self.desk.core.workers}


def test_owners_get_their_workers_and_one_stays_everybodys() -> None:
    pool = Pool("w0", "w1", "w2")
    pool.settle({ONE: 1})
    assert list(pool.owners().values()).count(ONE) == 1
    pool.settle({ONE: 2, TWO: 2})
    assert sorted(pool.owners().values(), key=str).count(None) == 1
    assert sorted(filter(None, pool.owners().values())) == [ONE, ONE]
    pool.settle({TWO: 1})
    assert sorted(filter(None, pool.owners().values())) == [TWO]
    pool.settle({})
    assert pool.owners() == {"w0": None, "w1": None, "w2": None}


def test_a_new_version_comes_in_the_place_of_the_one_before() -> None:
    pool, after = Pool("w0", "w1", "w2"), Owner(AdapterUid("after"), ONE.tenant_id)
    pool.settle({ONE: 2})
    mine = {worker_id for worker_id, owner in pool.owners().items() if owner == ONE}
    first = pool.look({after: 2})
    assert len(first) == 2
    assert first[0].owner == after
    pool.settle({after: 2})
    assert {worker_id for worker_id, owner in pool.owners().items() if owner == after} == mine


def test_a_worker_that_has_the_adapter_comes_first_and_one_changes_at_a_time() -> None:
    pool = Pool("w0", "w1", "w2", "w3")
    pool.desk.report("w2", adapters={"one": Residency.DEVICE})
    changes = pool.look({ONE: 1, TWO: 1})
    assert changes == [Change(WorkerId("w2"), ONE)]
    pool.desk.apply(WorkerDedicated(*changes[0]))
    assert pool.look({ONE: 1, TWO: 1}) == [], "the first is on its way"
    pool.tell("w2", ToldOwner(ONE, True))
    assert [change.owner for change in pool.look({ONE: 1, TWO: 1})] == [TWO]


def test_one_that_fails_is_left_alone_for_a_while() -> None:
    pool = Pool("w0", "w1")
    (change,) = pool.look({ONE: 1})
    pool.desk.apply(WorkerDedicated(*change))
    pool.tell(change.worker_id, ToldOwner(None, True, "its weights are quantized"))
    assert pool.look({ONE: 1}) == [Change(change.worker_id, None)]
    pool.desk.apply(WorkerDedicated(change.worker_id, None))
    pool.tell(change.worker_id, TO_EVERYBODY)
    told = {worker.worker_id: worker.merge_problem for worker in pool.desk.core.workers}
    assert told[change.worker_id] == "its weights are quantized", "for whoever asks later"
    (other,) = pool.look({ONE: 1})
    assert other.worker_id != change.worker_id
    assert pool.plan.look({ONE: 1}, pool.desk.core.workers, pool.desk.now + RETRY_S)[0].worker_id == change.worker_id
    blocked = Pool("w0", "w1")
    for worker in blocked.desk.core.workers:
        worker.can_merge = False
    assert blocked.look({ONE: 1}) == []


def test_where_all_others_are_lost_a_dedicated_worker_comes_back() -> None:
    pool = Pool("w0", "w1")
    pool.settle({ONE: 1})
    mine = next(worker_id for worker_id, owner in pool.owners().items() if owner == ONE)
    other = next(worker_id for worker_id, owner in pool.owners().items() if owner is None)
    pool.desk.apply(WorkerLeft(WorkerId(other)))
    assert pool.look({ONE: 1}) == []
    assert pool.look({ONE: 1}, LONELY_S) == [Change(WorkerId(mine), None)]
    pool.settle({ONE: 1})
    assert pool.owners() == {mine: None}, "it stays so while it is alone"


def test_who_fills_a_worker_by_itself_is_told() -> None:
    pool = Pool("w0", "w1", "w2", "w3")
    uses = [PoolUse("p", ONE[1], ONE[0], 0.55), PoolUse("p", TWO[1], TWO[0], 0.24), PoolUse("q", TWO[1], TWO[0], 0.9)]
    workers_of = {"p": pool.desk.core.workers}
    assert [(each.use.tenant_id, each.workers, each.pool_workers) for each in advice(uses, workers_of)] == [
        ("acme", 2, 4)
    ]
    pool.settle({ONE: 1})
    assert len(advice(uses, {"p": pool.desk.core.workers})) == 1
    pool.settle({ONE: 2})
    assert advice(uses, {"p": pool.desk.core.workers}) == []


def test_a_new_leader_takes_over_what_it_finds() -> None:
    desk, plan = Desk(), DedicationPlan(0.0)
    for worker_id, told in (("w0", ToldOwner(ONE, True)), ("w1", TO_EVERYBODY), ("w2", ToldOwner(TWO, False))):
        desk.worker(worker_id, owner=told)
    desk.worker("w3")
    assert [(w.owner, w.serves_owner) for w in desk.core.workers][:3] == [(ONE, True), (None, False), (TWO, False)]
    assert plan.look({ONE: 1, TWO: 1}, desk.core.workers, SETTLE_S) == []
    assert grants(desk.enqueue("r0", adapter="one")) == [("r0", "w0")]


def test_an_order_that_a_broken_stream_lost_is_given_again() -> None:
    pool = Pool("w0", "w1")
    pool.desk.apply(WorkerDedicated(WorkerId("w0"), ONE))
    again = pool.desk.report("w0", snapshot=True, owner=TO_EVERYBODY)
    assert [c for c in again if isinstance(c, SendDedicate)] == [SendDedicate(WorkerId("w0"), ONE)]


def test_a_dedicated_worker_runs_its_owners_requests_alone() -> None:
    pool = Pool("w0", "w1", slots=2)
    desk = pool.desk
    desk.apply(WorkerDedicated(WorkerId("w0"), ONE))
    for i in range(2):
        assert grants(desk.enqueue(f"early{i}", adapter="one")) == [(f"early{i}", "w1")], "until it is ready"
    assert not grants(desk.enqueue("queued", adapter="one"))
    assert not grants(desk.enqueue("base"))
    assert grants(desk.report("w0", slots=2, owner=ToldOwner(ONE, True))) == [("queued", "w0")]
    assert not grants(desk.enqueue("other", adapter="two"))
    assert not grants(desk.enqueue("other tenant", adapter="one", tenant="beta"))
    assert not grants(desk.enqueue("composed", adapter="one+two"))
    assert grants(desk.enqueue("own", adapter="one")) == [("own", "w0")]
    assert not grants(desk.enqueue("own2", adapter="one")), "both are full"
    done = desk.report("w0", slots=2, running=1, started=[started("queued"), started("own")], finished=["own"])
    assert grants(done) == [("own2", "w0")], "past those that came before it: they could not go there"


def test_when_the_dedicated_worker_is_lost_its_requests_go_to_the_others() -> None:
    pool = Pool("w0", "w1", slots=2)
    desk = pool.desk
    desk.apply(WorkerDedicated(WorkerId("w0"), ONE))
    desk.report("w0", slots=2, owner=ToldOwner(ONE, True))
    assert grants(desk.enqueue("r0", adapter="one")) == [("r0", "w0")]
    desk.apply(WorkerLeft(WorkerId("w0")))
    assert grants(desk.enqueue("r0", adapter="one", is_resumed=True)) == [("r0", "w1")]
    huge = desk.enqueue("huge", adapter="one", sequences=3)
    assert isinstance(huge[0], SendRefusal)
