"""The books of different services about the same thing, held against each other.

What callers got, what routers metered, what the leader settled and charged, what the engines did: each is counted at
its own place, and has to come out the same. All of this is for the end of a run, or for a moment of rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manylora.v1 import common_pb2
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.serving.term import Term
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from manylora_worker.app import WorkerApp
from manylora_worker.engine.counters import Setbacks

from tests.sim.cluster import Cluster, Engine, digest_of_adapter
from tests.sim.traffic import Call

_QUIET_S = 0.1
"""Longer than a settlement is on its way."""


@dataclass(frozen=True)
class Mark:
    """What was billed up to a moment."""

    term: Term
    settled: Mapping[FlowKey, int]
    """By the leader's books."""
    metered: Mapping[FlowKey, int]
    """By the routers'."""


async def mark(cluster: Cluster) -> Mark:
    """Waits for a moment at which no settlement is on its way. For when all has healed."""
    while cluster.loop.time() - cluster.meter.last_at < _QUIET_S:  # noqa: ASYNC110
        await asyncio.sleep(_QUIET_S / 2)
    return _mark(cluster)


def _mark(cluster: Cluster) -> Mark:
    leaders = cluster.leaders()
    assert len(leaders) == 1, f"{len(leaders)} schedulers lead, long after everything healed"
    (leader,) = leaders
    assert leader.term is not None
    views = leader.term.quotas.authority.views(cluster.loop.time())
    return Mark(leader.term, {view.flow: view.settled_tokens for view in views}, dict(cluster.meter.flows))


def check_billed_since(cluster: Cluster, before: Mark) -> None:
    """Under one leader, and at rest: what routers metered is what it settled, of every flow and to the token."""
    after = _mark(cluster)
    assert after.term is before.term, "the leader changed though nothing went wrong"
    for flow in {**after.metered, **after.settled}:
        settled = after.settled.get(flow, 0) - before.settled.get(flow, 0)
        metered = after.metered.get(flow, 0) - before.metered.get(flow, 0)
        assert settled == metered, f"{flow}: the leader settled {settled} tokens, and routers metered {metered}"


def check_meter(cluster: Cluster, calls: Sequence[Call]) -> None:
    """A request is billed at most once: what its caller was told that it used, which is what it got, less what was
    cached; where it was cut short, at least the tokens that its caller got and at most what it asked for."""
    exact = (common_pb2.OUTCOME_COMPLETED, common_pb2.OUTCOME_QUOTA_EXHAUSTED)
    billed = dict(cluster.meter.billed)
    unseen = 0
    for call in calls:
        if not call.frames or not call.frames[0].HasField("started"):
            unseen += 1
            finished = call.finished
            assert finished is None or finished.usage.prompt_tokens == 0, call.describe()
            continue
        bills = billed.pop(call.frames[0].started.request_id, [])
        got = sum(len(call.tokens_of(choice)) for choice in range(call.n))
        usage = call.finished.usage if call.finished is not None else None
        assert usage is None or usage.completion_tokens == got, call.describe()
        if usage is not None and call.finished.outcome in exact:
            assert usage.prompt_tokens == len(call.prompt), call.describe()
            used = usage.prompt_tokens - usage.cached_prompt_tokens + got
            assert bills == [used], f"billed {bills} for {used}: {call.describe()}"
        else:
            most = len(call.prompt) + call.n * call.max_tokens
            assert len(bills) <= 1, f"billed {bills}: {call.describe()}"
            assert got <= sum(bills) <= most, f"billed {bills} for {got}: {call.describe()}"
    # Begun, but the first frame did not reach the caller.
    assert len(billed) <= unseen, f"{len(billed)} requests were billed that {unseen} callers can have asked for"
    assert all(len(bills) == 1 for bills in billed.values()), billed


def check_ledger(cluster: Cluster, calls: Sequence[Call]) -> None:
    """A row has the tokens that were settled of its request, and what its caller got; a request that was billed has a
    row, unless its router is gone: then it was opened, and noted what it had given out."""
    ledger, billed = cluster.ledger, cluster.meter.billed
    for request_id, row in ledger.rows.items():
        bill = sum(billed.get(request_id, ()))
        assert row.settled_tokens == bill, f"a row of {row.settled_tokens} tokens for a bill of {bill}: {row}"
    assert not {*billed} - {*ledger.rows} - {*ledger.opened_rows}, "a request was billed and has no row"
    for call in calls:
        if not call.frames or not call.frames[0].HasField("started"):
            continue
        request_id = call.frames[0].started.request_id
        got = sum(len(call.tokens_of(choice)) for choice in range(call.n))
        known = ledger.rows.get(request_id)
        if known is None:
            _, amounts = ledger.opened_rows[request_id]
            assert amounts()[2] >= got, call.describe()
        elif call.finished is not None:
            assert known.completion_tokens == got, f"a row of {known.completion_tokens} for {got}: {call.describe()}"
        else:
            assert known.completion_tokens >= got, call.describe()


def check_cached(cluster: Cluster, calls: Sequence[Call]) -> None:
    """What the prefix cache is said to have had of a prompt, an earlier call of the same tenant and adapter brought, or
    an earlier attempt of the same call, whose stream broke before the router saw that it had begun; or an earlier call
    with the same content of a tenant that was in its cache group at some time."""

    def whose(call: Call) -> tuple[str, str]:
        content = digest_of_adapter(call.tenant, call.adapter) if call.adapter else ""
        return "*" if call.tenant in cluster.group_members else call.tenant, content

    prompts: dict[tuple[str, str], dict[tuple[int, ...], None]] = {}
    for call in sorted(calls, key=lambda call: call.ended_at or 0.0):
        mine = prompts.setdefault(whose(call), {})
        # An answer that ends later may have left its prompt there before: only its being there at all counts.
        cached = call.finished.usage.cached_prompt_tokens if call.finished is not None else 0
        if cached and tuple(call.prompt) not in mine:
            known = max((_common(call.prompt, prompt) for prompt in mine), default=0)
            if cached > known:
                beside = [c for c in calls if c is not call and whose(c) == whose(call)]
                known = max((_common(call.prompt, c.prompt) for c in beside if c.began_at < _end(call)), default=0)
            request_id = call.frames[0].started.request_id
            if cached > known and sum(engine.fence.begun[request_id] for engine in cluster.engines) > 1:
                known = len(call.prompt)
            assert cached <= known, f"{cached} tokens were cached, and {known} known: {call.describe()}"
        mine[tuple(call.prompt)] = None


def _end(call: Call) -> float:
    assert call.ended_at is not None
    return call.ended_at


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How long two prompts are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_fences(cluster: Cluster) -> None:
    """No worker, dead ones included, took anything of an epoch that was over."""
    faults = [fault for engine in cluster.engines for fault in engine.fence.faults]
    assert not faults, faults


def check_clock(cluster: Cluster) -> None:
    """At rest: the leader has charged exactly what the engines of the workers that are there have counted, whichever
    leaders charged it, and has reserved nothing. What befell tenants' sequences is what the status tells."""
    (leader,) = cluster.leaders()
    term = leader.term
    assert term is not None
    clock = term.core.clock_snapshot()
    assert not clock.reserved, f"reserved for nothing that runs: {clock.reserved}"
    setbacks: dict[str, Setbacks] = {}
    for name in cluster.names("worker"):
        engine = engine_of(cluster, name)
        costs = {
            flow: PROMPT_TOKEN_COST * tokens.prompt_tokens + OUTPUT_TOKEN_COST * tokens.output_tokens
            for flow, tokens in engine.core.flows().items()
        }
        charged = {flow: cost for flow, cost in clock.counted.get(name, {}).items() if cost}
        done = {flow: cost for flow, cost in costs.items() if cost}
        assert charged == done, f"{name} is charged {charged} for {done}"
        stats = engine.core.stats()
        told = Setbacks()
        for tenant_id, each in engine.runtime.view.setbacks.items():
            told = told.with_more(each)
            setbacks[tenant_id] = setbacks.get(tenant_id, Setbacks()).with_more(each)
        assert told == (stats.preemptions, stats.swaps_out, stats.evictions, stats.recomputed_tokens), name
    status = term.scheduler_status("").setbacks
    in_status = {s.tenant_id: (s.preemptions, s.swaps_out, s.evictions, s.recomputed_tokens) for s in status}
    assert in_status == setbacks, f"the status tells of {in_status}, and the engines of {setbacks}"


def engine_of(cluster: Cluster, worker: str) -> Engine:
    """The engine that a worker has now."""
    app = cluster.processes[worker].app
    assert isinstance(app, WorkerApp)
    return next(engine for engine in cluster.engines if engine.runtime is app._runtime)
