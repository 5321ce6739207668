"""Full memory and noisy neighbours move levels: batch's alone, and never of who is within its share."""

from __future__ import annotations

import pytest
from manylora_scheduler.core.events import WorkerReported
from manylora_scheduler.core.reports import StartedRequest
from manylora_scheduler.gates.neighbours import Noisy
from manylora_scheduler.gates.queue_delay import OverloadTargets
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import Rung, rung_of
from test_gates_overload import WORKER, Desk

from tests.scheduler.helpers import flow, report

LAX = OverloadTargets(interactive_s=1000.0, standard_s=1000.0)
GREEDY = TenantId("greedy")


def memory(desk: Desk, free: int, ended: int = 0) -> None:
    """The worker says how many of its 1000 blocks are free, and ends some requests."""
    begun = [StartedRequest(r, flow(), 1) for r in desk.running]
    finished, desk.running = desk.running[:ended], desk.running[ended:]
    told = report(slots=desk.slots, running=len(desk.running), started=begun, finished=finished, free=free)
    desk.apply(WorkerReported(WORKER, told))


def flood(desk: Desk, qos_class: QosClass, seconds: float, free: int = 900) -> None:
    """A tenant asks for far more than its share, beside one that asks for little."""
    for step in range(int(10 * seconds)):
        for _ in range(3):
            desk.enqueue("greedy", qos_class)
        if step % 4 == 0:
            desk.enqueue("modest", QosClass.STANDARD, max_new_tokens=1)
        memory(desk, free, ended=1)
        desk.wait(0.1)


@pytest.mark.parametrize(("free", "gives_up"), [(900, False), (20, True)])
def test_full_memory_gives_up_batch_before_anybody_waits_too_long(free: int, gives_up: bool) -> None:
    desk = Desk(targets=LAX)
    flood(desk, QosClass.BATCH, 12.0, free)
    assert (desk.gate.view.level > 16) == gives_up
    assert desk.gate.view.level <= 64, "no more than batch"
    refused = {command.request.flow for command in desk.refusals()}
    assert refused == ({flow("greedy", QosClass.BATCH)} if gives_up else set())


def test_memory_may_be_full_of_batch_alone() -> None:
    """Nobody waits for it: without a deadline batch waits as long as it takes."""
    desk = Desk(targets=LAX)
    for _ in range(100):
        desk.enqueue("greedy", QosClass.BATCH)
        memory(desk, 0)
        desk.wait(0.1)
    assert desk.gate.view.is_quiet
    assert desk.refusals() == []


@pytest.mark.parametrize(("kind", "acts"), [("kv_growth", True), ("adapter_thrash", True), ("wait_skew", False)])
def test_who_hurts_others_memory_and_is_above_its_share_gives_up_its_batch(
    monkeypatch: pytest.MonkeyPatch, kind: str, acts: bool
) -> None:
    desk = Desk(targets=LAX)
    found = (Noisy(kind, GREEDY, "w0", {"kv_part": 0.5}), Noisy(kind, TenantId("modest"), "w0", {}))
    monkeypatch.setattr(desk.gate._neighbours, "find", lambda *_: found)
    flood(desk, QosClass.BATCH, 12.0)
    level = desk.level("greedy")
    assert (rung_of(level) is not Rung.NONE) == acts
    assert level <= 64
    state = desk.gate.state()
    assert ("own_level" in state.noisy[0].evidence) == acts
    assert "own_level" not in state.noisy[1].evidence, "it is within its share: nothing is taken from it"
    assert {command.request.flow.tenant_id for command in desk.refusals()} == ({GREEDY} if acts else set())
    monkeypatch.setattr(desk.gate._neighbours, "find", lambda *_: ())
    desk.wait(60.0)
    assert desk.level("greedy") <= 16, "nothing is taken from it any more"


def test_nothing_but_batch_is_given_up_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(targets=LAX)
    monkeypatch.setattr(desk.gate._neighbours, "find", lambda *_: (Noisy("kv_growth", GREEDY, "w0", {}),))
    flood(desk, QosClass.STANDARD, 8.0)
    assert desk.refusals() == []
