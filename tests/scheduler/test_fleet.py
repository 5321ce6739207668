"""All workers, and the orders in which one is looked for."""

from __future__ import annotations

from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.worker_view import WorkerView
from manylora_shared.ids import WorkerId

from tests.scheduler.helpers import report, request


def joined(fleet: Fleet, name: str, **what: int) -> WorkerView:
    worker = fleet.join(WorkerId(name), f"{name}:1", "cpu", 4096)
    tell(fleet, worker, snapshot=True, **what)
    return worker


def tell(fleet: Fleet, worker: WorkerView, **what: int) -> bool:
    worker.fold_capacity(report(**what))  # type: ignore[arg-type]
    changed = fleet.update(worker)
    fleet.check_invariants()
    return changed


def names(workers: object) -> list[str]:
    return [worker.worker_id for worker in workers]  # type: ignore[attr-defined]


def test_who_joined_takes_nothing_before_its_snapshot() -> None:
    fleet = Fleet()
    fleet.join(WorkerId("w0"), "w0:1", "cpu", 4096)
    fleet.check_invariants()
    assert (len(fleet), fleet.any_serving, fleet.all_connected, fleet.has_room) == (1, False, False, False)
    assert tell(fleet, next(iter(fleet.workers)), snapshot=True)
    assert fleet.any_serving
    assert fleet.all_connected
    assert fleet.has_room


def test_open_workers_come_least_loaded_first_by_the_part_of_their_slots() -> None:
    fleet = Fleet()
    half = joined(fleet, "half", slots=8, running=4)
    joined(fleet, "third", slots=3, running=1)
    joined(fleet, "full", slots=2, running=2)
    joined(fleet, "tenth", slots=10, running=1)
    assert names(fleet.open_workers()) == ["tenth", "third", "half"]
    assert fleet.slotted_sequences == 6, "of open workers alone"
    tell(fleet, half, slots=8)
    assert fleet.slotted_sequences == 2
    assert names(fleet.open_workers()) == ["half", "tenth", "third"]


def test_of_equal_load_the_one_with_more_free_kv_goes_first_and_then_the_name_decides() -> None:
    fleet = Fleet()
    joined(fleet, "b", free=1000)
    joined(fleet, "a", free=1000)
    joined(fleet, "little", free=200)
    assert names(fleet.open_workers()) == ["a", "b", "little"]
    assert fleet.most_free_kv == 1000 * 16


def test_a_full_worker_may_have_places_beyond_its_slots() -> None:
    fleet = Fleet()
    joined(fleet, "few", slots=2, running=2, most=3)
    joined(fleet, "many", slots=2, running=2, most=9)
    joined(fleet, "none", slots=2, running=2)
    assert names(fleet.spare_workers()) == ["many", "few"]
    assert (fleet.num_open, fleet.num_spare, fleet.has_room, fleet.most_free_kv) == (0, 2, True, 0)


def test_the_only_open_one_is_known_and_who_leaves_is_gone_from_every_order() -> None:
    fleet = Fleet()
    first, second = joined(fleet, "w0"), joined(fleet, "w1")
    assert fleet.only_open is None
    assert not tell(fleet, second, running=4), "it is full, and serves"
    assert fleet.only_open is first
    assert fleet.leave(WorkerId("w0")) is first
    fleet.check_invariants()
    assert fleet.only_open is None
    assert list(fleet.open_workers()) == []
    assert fleet.leave(WorkerId("w0")) is None


def test_a_draining_worker_could_not_run_what_it_has_room_for() -> None:
    fleet = Fleet()
    worker = joined(fleet, "w0", slots=4)
    assert fleet.could_ever_run(request("r", sequences=4))
    assert not fleet.could_ever_run(request("r", sequences=5))
    assert tell(fleet, worker, draining=True), "it ceased to take requests"
    assert not fleet.could_ever_run(request("r"))
    assert fleet.all_connected
