"""Two tenants of weights 4 and 1 behind two routers, each with more to do than there is room: 4:1, whoever asks where.

Prints a JSON line for each case (`-s`), which docs/FIGURES.md tells.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy
from manylora_sim.loop import run

from tests.sim.cluster import Cluster
from tests.sim.traffic import Call, Traffic

WEIGHTS = {"acme": 4, "bolt": 1}
WITHIN = 0.02
OUTSTANDING = 30
"""Calls of each tenant's: more than all slots and places of all workers."""
PROMPT_TOKENS, ANSWER_TOKENS = 8, 16
WARM_UP_S = 3.0
COMPLETIONS = 320
BOTH = ("router0", "router1")
CASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "both ask both": {"acme": BOTH, "bolt": BOTH},
    "each asks its own": {"acme": BOTH[:1], "bolt": BOTH[1:]},
    "the heavy one asks one": {"acme": BOTH[:1], "bolt": BOTH},
}


class Backlog:
    """Each tenant always has OUTSTANDING calls under way, at its routers in turn. All calls cost the same."""

    def __init__(self, cluster: Cluster, places: Mapping[str, tuple[str, ...]]) -> None:
        self.traffic = Traffic(cluster, 1)
        self._places = places

    async def keep(self, tenant: str) -> None:
        running: list[Call] = []
        while True:
            running = [call for call in running if call.ended_at is None]
            while len(running) < OUTSTANDING:
                running.append(self._begin(tenant))
            await asyncio.sleep(0.02)

    def _begin(self, tenant: str) -> Call:
        call, places = self.traffic.plain(tenant), self._places[tenant]
        call.qos_class, call.adapter, call.n, call.is_greedy = "standard", "", 1, False
        call.prompt, call.max_tokens = [*call.prompt, *range(30, 60)][:PROMPT_TOKENS], ANSWER_TOKENS
        call.ignores_eos = True
        call.router = places[call.number // len(WEIGHTS) % len(places)]
        self.traffic.begin(call)
        return call

    def ended(self, since_s: float) -> list[Call]:
        found = [call for call in self.traffic.calls if call.ended_at is not None and call.ended_at > since_s]
        return sorted(found, key=lambda call: call.ended_at or 0.0)


async def shares(places: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Of COMPLETIONS in a row, each tenant's."""
    cluster = Cluster(5, workers=2, overload=False)
    await cluster.start()
    store = cluster.store_server.client()
    for tenant, weight in WEIGHTS.items():
        await cluster.put_policy(store, TenantPolicy(TenantId(tenant), {c: ClassPolicy(weight) for c in QosClass}))
    await asyncio.sleep(0.5)
    backlog = Backlog(cluster, places)
    tasks = [asyncio.create_task(backlog.keep(tenant)) for tenant in WEIGHTS]
    await asyncio.sleep(WARM_UP_S)
    since_s = cluster.loop.time()
    while len(backlog.ended(since_s)) < COMPLETIONS:
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
    counted = backlog.ended(since_s)[:COMPLETIONS]
    assert all(call.error is None for call in counted)
    assert {call.router for call in counted} == {router for each in places.values() for router in each}
    for task in tasks:
        task.cancel()
    await backlog.traffic.all_ended(60.0)
    return {tenant: sum(call.tenant == tenant for call in counted) for tenant in WEIGHTS}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "each asks its own" else pytest.mark.wide) for case in CASES]
)
def test_two_routers_keep_four_to_one(case: str) -> None:
    """Another server's two routers, which each have a queue of their own, made 163:162 of 256:64."""
    found: dict[str, int] = {}

    async def main() -> None:
        found.update(await shares(CASES[case]))

    run(main(), seed=5, limit_s=600.0, max_events=5_000_000)
    ratio = found["acme"] / found["bolt"]
    print(json.dumps({"bench": "two_routers", "case": case, **found, "ratio": round(ratio, 3)}))
    assert abs(ratio / 4 - 1) <= WITHIN
