"""Intake by itself: the job that a request becomes, and in which order it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from manylora_router.guard.admission import RequestInput, TextPrompt, TokenPrompt
from manylora_router.guard.permits import Permit
from manylora_router.request.job import Job
from manylora_router.text.constraints import ConstraintCheck
from manylora_router.text.service import TokenIdsOnlyText
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import FieldViolation, InvalidRequest, NotFound, Overloaded, Unready
from manylora_shared.metadata import ADAPTER_KEY
from manylora_shared.sampling import Sampling
from manylora_sim.fake_text import FakeText
from router_fakes import EOS, RouterCluster, ids_of, plain_request, simulate, until
from test_router_overload import BATCH_CLOSED, hears


class CountingText(FakeText):
    """Counts the prompts that were tokenized."""

    def __init__(self) -> None:
        super().__init__()
        self.num_encoded = 0

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        self.num_encoded += 1
        return await super().encode(text)


async def admit(cluster: RouterCluster, request: RequestInput) -> tuple[Job, Permit]:
    intake = cluster.app.intake
    tenant = intake.tenant_of(request)
    with cluster.app.calls.open(request, tenant) as call:
        job, permit = await intake.admit(request, tenant, call)
        call.begin(job, permit)
        assert (job.request_id, job.received_at) == (call.request_id, call.received_at)
    return job, permit


def test_a_request_becomes_a_job() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = await plain_request(
            cluster,
            adapter="upper",
            request_class="batch",
            priority="-3",
            n=2,
            stop=["."],
            stop_token_ids=[9],
            sampling=Sampling(temperature=0.5, seed=7, logit_bias={3: 1.5}),
            time_remaining_s=10.0,
        )
        job, permit = await admit(cluster, request)
        assert (job.tenant_id, job.qos_class.value, job.priority, job.n) == ("acme", "batch", -3, 2)
        assert (list(job.prompt_token_ids), job.max_tokens) == (ids_of("hi"), 32)
        assert job.adapter is not None
        assert (permit.tenant, permit.adapter) == ("acme", job.adapter.digest)
        assert (job.sampling.seed, job.sampling.temperature, dict(job.sampling.logit_bias)) == (7, 0.5, {3: 1.5})
        assert list(job.stop_token_ids) == [9, EOS]
        assert job.stop is not None
        assert job.deadline == pytest.approx(job.received_at + 10.0 - 0.02)

    simulate(test)


class TextWithTokens(FakeText):
    end_token_ids = (21, 1 << 20)

    def stop_tokens(self, stops: Sequence[str]) -> dict[int, str]:
        return {20: "<end>", 1 << 20: "beyond the model"}


def test_a_stop_string_that_is_a_token_stops_the_worker() -> None:
    async def test(cluster: RouterCluster) -> None:
        job, _ = await admit(cluster, await plain_request(cluster, stop=["<end>"], stop_token_ids=[9]))
        assert (list(job.stop_token_ids), job.stop_tokens) == ([9, 20, EOS], {20: "<end>"})
        assert job.stop is not None

    simulate(test, text=TextWithTokens())


def test_ends_are_the_tokenizers_where_the_model_names_none() -> None:
    async def test(cluster: RouterCluster) -> None:
        asked = await plain_request(cluster)
        intake = cluster.app.intake
        model = replace(intake._model("default"), eos_token_ids=())
        intake._model = lambda pool: model  # type: ignore[method-assign]
        for ignore_eos, ends in ((False, [21]), (True, [])):
            job, _ = await admit(cluster, replace(asked, ignore_eos=ignore_eos))
            assert list(job.stop_token_ids) == ends

    simulate(test, text=TextWithTokens())


def test_a_request_that_asks_for_little_gets_defaults() -> None:
    async def test(cluster: RouterCluster) -> None:
        job, _ = await admit(cluster, await plain_request(cluster, ignore_eos=True))
        assert (job.qos_class.value, job.priority, job.n, job.adapter) == ("standard", 0, 1, None)
        assert (job.stop, job.stop_token_ids, job.deadline) == (None, [], None)
        again, _ = await admit(cluster, await plain_request(cluster))
        assert again.sampling.seed != job.sampling.seed

    simulate(test)


class SlowText(FakeText):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        self.order.append(text[0])
        await asyncio.sleep(0.01)
        return await super().encode(text)


@pytest.mark.parametrize("takes", [True, False])
def test_a_models_sampling_holds_where_a_request_sets_none(takes: bool) -> None:
    async def test(cluster: RouterCluster) -> None:
        directory = cluster.app.directory
        directory._takes_sampling_defaults = takes
        for worker in list(directory.workers.values()):
            given = {"temperature": 0.6, "top_k": 20, "of a later version": 1.0}
            await cluster.store.put(worker.key, replace(worker, sampling_defaults=given).to_json())
        await until(lambda: all(worker.sampling_defaults for worker in directory.workers.values()))
        job, _ = await admit(cluster, await plain_request(cluster))
        assert (job.sampling.temperature, job.sampling.top_k, job.sampling.top_p) == (
            (0.6, 20, 1.0) if takes else (1.0, 0, 1.0)
        )
        own = Sampling(temperature=1.0, top_p=0.5)
        job, _ = await admit(cluster, await plain_request(cluster, sampling=own))
        assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (1.0, 0.5, 20 if takes else 0)
        models = cluster.app.intake.models(await plain_request(cluster))
        assert models.sampling_defaults == ({"temperature": 0.6, "top_k": 20} if takes else {})

    simulate(test)


def test_a_flood_of_texts_holds_up_no_other_tenants() -> None:
    text = SlowText()

    async def test(cluster: RouterCluster) -> None:
        flood = await plain_request(cluster, TextPrompt("f" * 20))
        other = replace(flood, tenant="other", prompt=TextPrompt("v"))
        tasks = [asyncio.create_task(admit(cluster, each)) for each in [*[flood] * 12, other, other]]
        await asyncio.gather(*tasks)
        assert "".join(text.order).index("v") <= 2
        assert text.order.count("f") == 12

    simulate(test, text=text)


class _SlowChecks(ConstraintCheck):
    """In virtual time: each takes seconds."""

    async def violation(self, tenant: str, constraint: Constraint) -> FieldViolation | None:
        await asyncio.sleep(2.0)
        return FieldViolation(constraint.field, "takes long") if tenant == "acme" else None


def test_slow_constraints_hold_up_no_other_tenants() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.app.intake._constraints = _SlowChecks()
        slow = await plain_request(cluster, constraint=Constraint.regex("a+"))
        flood = [asyncio.create_task(admit(cluster, slow)) for _ in range(12)]
        await asyncio.sleep(0.5)
        begun = asyncio.get_running_loop().time()
        await admit(cluster, replace(slow, tenant="other"))
        assert asyncio.get_running_loop().time() - begun < 2.5
        told = await asyncio.gather(*flood, return_exceptions=True)
        assert {type(each) for each in told} == {InvalidRequest, Overloaded}
        assert all(each.retry_after_s for each in told if isinstance(each, Overloaded))

    simulate(test)


class _GoodChecks(ConstraintCheck):
    num_asked = 0

    async def violation(self, tenant: str, constraint: Constraint) -> FieldViolation | None:
        await asyncio.sleep(2.0)
        self.num_asked += 1
        self._remember(tenant, constraint.digest)
        return None


def test_a_constraint_that_many_calls_bring_at_once_is_looked_at_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        checks = cluster.app.intake._constraints = _GoodChecks()
        asked = await plain_request(cluster, constraint=Constraint.regex("a+"))
        await asyncio.gather(*(admit(cluster, asked) for _ in range(30)))
        assert checks.num_asked == 1

    simulate(test)


def test_bad_words_go_on_as_tokens() -> None:
    async def test(cluster: RouterCluster) -> None:
        sampling = Sampling(min_tokens=3, bad_words=[" no", "  "])
        job, _ = await admit(cluster, await plain_request(cluster, sampling=sampling))
        assert (job.sampling.min_tokens, job.sampling.bad_words) == (3, ())
        assert job.bad_sequences == [ids_of("no"), ids_of("  ")]
        for words in (["x"] * 65, [""]):
            with pytest.raises(InvalidRequest, match=r"sampling\.bad_words"):
                await admit(cluster, await plain_request(cluster, sampling=Sampling(bad_words=words)))
        with pytest.raises(InvalidRequest, match=r"sampling\.bad_words: has 1280 tokens, more than 1024"):
            await admit(cluster, await plain_request(cluster, sampling=Sampling(bad_words=["x" * 20] * 64)))

    simulate(test)


def test_bad_words_need_a_tokenizer() -> None:
    async def test(cluster: RouterCluster) -> None:
        asked = await plain_request(cluster, TokenPrompt([3]), sampling=Sampling(bad_words=["no"]))
        with pytest.raises(Unready, match=r"sampling\.bad_words"):
            await admit(cluster, asked)

    simulate(test, text=TokenIdsOnlyText())


def test_a_short_deadline_keeps_most_of_its_time() -> None:
    async def test(cluster: RouterCluster) -> None:
        job, _ = await admit(cluster, await plain_request(cluster, time_remaining_s=0.1))
        assert job.deadline == pytest.approx(job.received_at + 0.09)

    simulate(test)


def test_what_is_refused_is_not_tokenized() -> None:
    text = CountingText()

    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        with pytest.raises(Overloaded):
            await admit(cluster, await plain_request(cluster, request_class="batch"))
        with pytest.raises(NotFound, match=ADAPTER_KEY):
            await admit(cluster, await plain_request(cluster, adapter="secret"))
        with pytest.raises(InvalidRequest, match=r"prompt\.text"):
            await admit(cluster, await plain_request(cluster, TextPrompt("x" * 100_000)))
        assert text.num_encoded == 0

    simulate(test, text=text)


def test_overload_is_told_before_what_else_is_wrong() -> None:
    async def test(cluster: RouterCluster) -> None:
        await hears(cluster, BATCH_CLOSED)
        with pytest.raises(Overloaded):
            await admit(cluster, await plain_request(cluster, request_class="batch", n=99))

    simulate(test)


def test_stop_strings_need_text() -> None:
    class NoTokenizer(FakeText):
        has_text = False

    async def test(cluster: RouterCluster) -> None:
        with pytest.raises(Unready, match="stop"):
            await admit(cluster, await plain_request(cluster, stop=["."]))

    simulate(test, text=NoTokenizer())


def test_models_are_the_tenants_own() -> None:
    async def test(cluster: RouterCluster) -> None:
        models = cluster.app.intake.models(await plain_request(cluster))
        assert (models.base_model, [each.name for each in models.adapters]) == ("tiny", ["upper"])

    simulate(test)
