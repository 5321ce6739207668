"""What a router counts of versions that are tried, and tells the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

from manylora.v1 import common_pb2, scheduler_pb2, worker_pb2
from manylora_router.guard.admission import Adapter
from manylora_router.guard.trials import Outcome, Trials
from manylora_shared.adapter_reference import AdapterPart
from manylora_shared.ids import AdapterDigest, AdapterName, AdapterUid, TenantId
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.tenancy.slo import bucket_of
from manylora_shared.tenancy.trial import VersionCounts
from router_fakes import RouterCluster, finished, say, simulate, text_request, until
from test_admin_adapters import call
from test_admin_versions import NAME, add_two

ACME = TenantId("acme")


def adapter(trial: str = "t", *, is_canary: bool = True) -> Adapter:
    return Adapter("up", AdapterUid("d@u"), (AdapterPart(AdapterName("up"), 2),), trial, is_canary)


def test_outcomes_count_for_the_version_that_had_the_request() -> None:
    trials = Trials()
    key, other = (ACME, AdapterName("up"), "t"), (ACME, AdapterName("other"), "x")
    trials.stand([key, other])
    trials.ended(ACME, adapter(), Outcome(has_failed=True))
    warm = Outcome(has_failed=False, is_cut=True, ttft_ms=50.0, is_warm=True, tpot_ms=7.0)
    trials.ended(ACME, adapter(), warm)
    trials.stand([key, other])
    trials.ended(ACME, adapter(is_canary=False), Outcome(has_failed=False, ttft_ms=50.0))
    trials.ended(ACME, adapter(""), Outcome(has_failed=True))
    trials.scored(ACME, adapter(), 0.84)
    taken = trials.take()
    assert taken[key] == (
        VersionCounts(1, 1, 1, {}, {bucket_of(50.0): 1}, {bucket_of(7.0): 1}, {8: 1}),
        VersionCounts(1, 0, 0, {bucket_of(50.0): 1}),
    )
    assert taken[other] == (VersionCounts(), VersionCounts()), "it says that it stands"
    assert trials.take()[key] == (VersionCounts(), VersionCounts()), "each outcome is told once"


def test_what_no_rollout_stands_for_is_not_counted() -> None:
    """So what a tenant's rollouts cost here is bounded where they begin."""
    trials = Trials()
    trials.ended(ACME, adapter(), Outcome(has_failed=True))
    trials.scored(ACME, adapter(), 1.0)
    key = ACME, AdapterName("up"), "t"
    trials.stand([key])
    assert trials.take()[key] == (VersionCounts(), VersionCounts())
    trials.ended(ACME, adapter(), Outcome(has_failed=True))
    trials.stand([])
    assert trials.take() == {}


async def fails(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    yield finished(outcome=common_pb2.OUTCOME_ADAPTER_FAILED, message="no such file")


def told(cluster: RouterCluster) -> tuple[VersionCounts, VersionCounts]:
    """All that the scheduler was told, of canary and stable."""
    sums = VersionCounts(), VersionCounts()
    for message in cluster.scheduler.trials:
        for total, part in zip(sums, (message.canary, message.stable), strict=True):
            maps = (dict(each) for each in (part.cold, part.warm, part.token, part.scores))
            total.add(VersionCounts(part.completed, part.failed, part.cut, *maps))
    return sums


def test_the_scheduler_is_told_of_both_versions_and_of_a_rollout_without_requests() -> None:
    async def test(cluster: RouterCluster) -> None:
        _, second = await add_two(cluster)
        good, copy = say("hello"), TenantPolicy(ACME).copy_of(AdapterDigest(second.version))

        async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            async for message in (fails if request.adapter_uid == copy else good)(request):
                yield message

        for worker in cluster.workers:
            worker.script = script
        line = (await call(cluster, "RolloutAdapter", **NAME, to=2, auto={"steps": [50], "min_requests": 9})).line
        assert (line.rollout.percent, list(line.rollout.auto.steps), line.rollout.auto.step_limit_s) == (
            50,
            [50],
            86400,
        )
        await until(lambda: bool(cluster.scheduler.trials))
        first = cluster.scheduler.trials[0]
        assert first == scheduler_pb2.TrialCounts(
            tenant_id="acme",
            name="lower",
            trial=first.trial,
            canary=scheduler_pb2.VersionCounts(),
            stable=scheduler_pb2.VersionCounts(),
        )
        answers = [await cluster.ask(text_request(), x_adapter_id="lower") for _ in range(20)]
        failed = sum(each.error is not None for each in answers)
        assert 0 < failed < 20
        await cluster.ask(text_request(), x_adapter_id="lower@2")
        await until(lambda: sum(each.requests for each in told(cluster)) >= 20)
        canary, stable = told(cluster)
        assert (canary.completed, canary.failed) == (0, failed), "refusals of its open circuit are failures too"
        assert (stable.completed, stable.failed, sum(stable.cold.values())) == (20 - failed, 0, 20 - failed)
        await call(cluster, "RollbackAdapter", **NAME)
        await until(lambda: not cluster.app.directory.trials)

    simulate(test)


def test_times_on_workers_of_its_own_are_not_compared_with_those_on_everybodys() -> None:
    """The version in force has merged workers, which take nobody else's requests; the version that is tried has not."""

    async def test(cluster: RouterCluster) -> None:
        await add_two(cluster)
        for worker in cluster.workers:
            worker.script = say("hello")
        await call(cluster, "ApplyTenant", policy_yaml="tenant_id: acme\nadapters: {dedicated: {lower: 1}}\n")
        await call(cluster, "RolloutAdapter", **NAME, to=2, auto={"steps": [50], "min_requests": 9})
        await until(lambda: bool(cluster.scheduler.trials))
        for _ in range(12):
            await cluster.ask(text_request(), x_adapter_id="lower")
        await until(lambda: sum(each.requests for each in told(cluster)) >= 12)
        for counts in told(cluster):
            assert counts.completed > 0, "errors, ends and scores are"
            assert (counts.cold, counts.warm, counts.token) == ({}, {}, {})

    simulate(test)
