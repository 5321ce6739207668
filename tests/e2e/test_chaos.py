"""`make chaos` in small: three faults, on loopback, with workers that compute nothing; and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.__main__ import line_of, skipped, suffer, table
from bench.chaos.callers import Callers, Seen, Summary, baseline
from bench.chaos.cluster import ChaosCluster, Setting
from bench.chaos.faults import FAULTS, Effect, Fault

LOOPBACK = Setting(networks=False, has_disk=False, is_fake=True)
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.e2e
@pytest.mark.wide
async def test_what_callers_see_stays_within_what_is_stated(tmp_path: Path) -> None:
    async with ChaosCluster(tmp_path, LOOPBACK) as cluster:
        answers = await baseline(cluster)
        for name in ("worker killed", "leader killed", "prefixes dropped"):
            line = await suffer(cluster, BY_NAME[name], answers)
            assert line["errors"] == {"patient": {}, "plain": {}, "calm": {}}, line
            assert (line["changed"], line["hung"], line["availability"]) == (0, 0, 1.0), line
            assert line["requests"]["calm"] > 10
            assert (line["resumed"] > 0) == (name == "worker killed"), line
            assert line["new_leader"] == (name == "leader killed"), line


def seen(**changes: object) -> Summary:
    fields: dict[str, object] = {
        "requests": {"patient": 4, "plain": 4, "calm": 40},
        "errors": {"patient": {}, "plain": {"UNAVAILABLE": 2}, "calm": {}},
        "changed": 0,
        "hung": 0,
        "resumed": 3,
        "pause_p95_s": 0.5,
        "calm_ttft_p95_ms": 90.0,
        "availability": 1.0,
    }
    return Summary(**(fields | changes))  # type: ignore[arg-type]


def test_a_fault_is_contained_or_not_and_the_table_says_in_what() -> None:
    router = BY_NAME["router killed"]
    assert line_of(router, seen(), 1.0)["contained"]
    worker = Fault("worker killed", Effect(), router.begin)
    for changes, said in (
        ({}, "plain callers: {'UNAVAILABLE': 2}"),
        ({"changed": 1}, "1 answers changed"),
        ({"hung": 1}, "1 answers hang"),
        ({"pause_p95_s": 2.5}, "pause p95 2.50 s > 2"),
        ({"calm_ttft_p95_ms": 2500.0}, "TTFT p95 2500 ms > 2000"),
        ({"availability": 0.975}, "availability 0.9750 < 1"),
    ):
        line = line_of(worker, seen(**changes), 1.0)
        assert said in line["beyond"]
        assert f"**no**: {'; '.join(line['beyond'])}" in table([line])
    led = line_of(worker, seen(errors={"patient": {}, "plain": {}, "calm": {}}), 1.0, new_leader=True)
    assert led["beyond"] == ["another scheduler leads"]
    assert "nothing was done" in line_of(BY_NAME["leader killed"], seen(), 1.0)["beyond"][-1]
    told = table([line_of(router, seen(pause_p95_s=None), 2.04)]).splitlines()
    assert told[-1] == "| router killed | 0 of 4 | 2 UNAVAILABLE of 4 | 0 | 3 | - | 90 | 100.0 % |  | 2.0 | yes |"


def test_what_ran_beside_the_fault_counts_and_a_changed_token_is_found() -> None:
    callers = Callers(None, {0: (1, 2, 3)})  # type: ignore[arg-type]
    callers.seen = [
        Seen("patient", 0, 0.0, 0.1, 1.0, 0.3, tokens=(9,)),  # before
        Seen("patient", 0, 0.0, 0.1, 3.0, 0.3, tokens=(1, 2, 3), resumed=True),
        Seen("plain", 0, 1.5, 2.6, 4.0, 0.9, tokens=(1, 7)),
        Seen("plain", 0, 2.5, 2.6, 4.0, 5.0, tokens=(1,)),  # it came later
        Seen("plain", 0, 2.5, code="UNAVAILABLE", ended_s=2.6),
        Seen("calm", 0, 2.5, 2.55, 2.6, tokens=(1,)),
        Seen("calm", 0, 2.7),
        Seen("calm", 0, 9.0, 9.1, 9.2, tokens=(9,)),  # after
    ]
    found = callers.summary(2.0, 5.0)
    assert found.requests == {"patient": 1, "plain": 3, "calm": 2}
    assert found.errors == {"patient": {}, "plain": {"UNAVAILABLE": 1}, "calm": {}}
    assert (found.changed, found.hung, found.resumed, found.availability) == (1, 1, 1, 0.5)
    assert found.pause_p95_s == pytest.approx(0.87)
    assert found.calm_ttft_p95_ms == pytest.approx(50)


def test_what_a_machine_cannot_do_is_left_out() -> None:
    left = {fault.name for fault in FAULTS if skipped(fault, LOOPBACK)}
    assert {"worker cut off", "leader cut from etcd", "etcd's disk full", "clocks an hour on"} <= left
    assert not left & {"worker killed", "leader frozen", "etcd's quota full", "adapters dropped"}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
