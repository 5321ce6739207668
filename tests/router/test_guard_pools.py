"""Requests to the pool that they name, that their adapter is of, or that their tenant's policy puts first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from http_fakes import http_front
from manylora.v1 import admin_pb2, inference_pb2, scheduler_pb2
from manylora_router.guard.admission import Adapter
from manylora_router.guard.pools import ModelNames, choose, names_of
from manylora_shared.adapter_reference import AdapterPart
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord, WorkerRecord
from manylora_shared.errors import Code, InvalidRequest, NotFound, PermissionDenied
from manylora_shared.ids import AdapterName, AdapterUid, TenantId
from manylora_shared.tenancy.degrade import Step, Taken
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_sim.fake_text import FakeText
from router_fakes import LIST_MODELS, FakeWorker, RouterCluster, say, simulate, text_request, until
from test_admin_adapters import GOOD, upload

LARGE, SMALL = "1" * 64, "2" * 64


@dataclass(frozen=True)
class Base:
    name: str
    digest: str


MODELS = {"default": Base("llama:8b", LARGE), "small": Base("llama:1b", SMALL), "twin": Base("llama:8b", LARGE)}


def policy(*pools: str) -> TenantPolicy:
    return TenantPolicy(TenantId("acme"), pools=pools)


def adapter(pool: str, digest: str = "") -> Adapter:
    return Adapter("upper", AdapterUid("a"), (AdapterPart(AdapterName("upper")),), pool=pool, base_digest=digest)


def test_models_are_called_by_their_base_and_by_their_pool() -> None:
    names = names_of(("default", "small", "twin"), MODELS)
    assert names.pools == {"llama:8b": "default", "llama:1b": "small", "small": "small", "twin": "twin"}
    assert names.own == "llama:8b"
    assert names_of(("twin", "default"), MODELS).pools == {"llama:8b": "twin", "twin": "twin"}, "the policy's first"
    assert names_of(("default", "gone"), {}) == ModelNames({"gone": "gone"}, "")


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("", ("", "")),
        ("llama:8b", ("llama:8b", "")),
        ("llama:8b:upper", ("llama:8b", "upper")),
        ("small:upper@2", ("small", "upper@2")),
        ("upper", ("", "upper")),
        ("llama:7b", ("", "llama:7b")),
        ("default", ("", "default")),
    ],
)
def test_a_model_is_split_into_base_and_adapter(model: str, split: tuple[str, str]) -> None:
    assert names_of(("default", "small"), MODELS).split(model) == split


def test_where_a_request_goes() -> None:
    both = policy("default", "small")
    assert choose(both, "", None, MODELS) == "default"
    assert choose(policy("small", "default"), "", None, MODELS) == "small"
    assert choose(both, "llama:1b", None, MODELS) == choose(both, "small", None, MODELS) == "small"
    assert choose(both, "default", None, MODELS) == "default"
    assert choose(both, "", adapter("small"), MODELS) == "small"
    assert choose(both, "small", adapter("small"), MODELS) == "small"
    three = policy("default", "twin")
    assert choose(three, "twin", adapter("default", LARGE), MODELS) == "twin", "of the same base"


def test_what_is_refused() -> None:
    with pytest.raises(NotFound, match="model: 'llama:1b' is not known to this tenant"):
        choose(policy("default"), "llama:1b", None, MODELS)
    both = policy("default", "small")
    for digest in (LARGE, ""):
        with pytest.raises(InvalidRequest, match="'upper' is an adapter of pool default, and small has another base"):
            choose(both, "small", adapter("default", digest), MODELS)
    with pytest.raises(PermissionDenied, match="may not use pool small, whose adapter it names"):
        choose(policy("default"), "", adapter("small"), MODELS)


class SmallWorker(FakeWorker):
    def record(self, address: str) -> WorkerRecord:
        record = super().record(address)
        return dataclasses.replace(record, pool="small", model_name="mini", model_digest=SMALL, max_context_tokens=64)


POOLS = "pools: [default, small]\n"


async def with_small(cluster: RouterCluster, *, is_granted: bool = True) -> FakeWorker:
    """A worker of the pool small; with `is_granted` the scheduler grants to it alone."""
    worker = SmallWorker("mini-0", say("mini says"))
    granting = list(cluster.scheduler.workers)
    await cluster.start_worker(worker)
    cluster.scheduler.workers = cluster.scheduler.workers[-1:] if is_granted else granting
    cluster.app._texts._known["small"] = FakeText(first_byte_id=0)
    await cluster.put_tenant("acme", POOLS)
    await until(
        lambda: "small" in cluster.app.directory.models and len(cluster.app.directory.pools_of(TenantId("acme"))) > 1
    )
    return worker


def test_a_request_runs_by_its_pools_tokenizer_and_limits() -> None:
    async def test(cluster: RouterCluster) -> None:
        worker = await with_small(cluster)
        for model in ("mini", "small"):
            answer = await cluster.ask(text_request("hi", model=model))
            assert answer.error is None
        (first, _), (asked, _) = worker.executed, cluster.scheduler.enqueued
        assert list(first.prompt_token_ids) == list(b"hi"), "the small pool's tokenizer begins at 0"
        assert asked.pool == "small"
        told = await cluster.ask(text_request("hi", model="small", max_tokens=100))
        assert told.error is not None
        assert "the context of 64 tokens" in told.error.message
        told = await cluster.ask(text_request("hi", model="other"))
        assert told.error is not None
        assert (told.error.code, told.error.message) == (Code.NOT_FOUND, "model: 'other' is not known to this tenant")
        foreign = await cluster.ask(text_request("hi", model="small"), x_tenant_id="other")
        assert foreign.error is not None
        assert foreign.error.code is Code.NOT_FOUND, "its policy does not name the pool"

    simulate(test)


def test_a_request_without_a_model_is_the_default_pools() -> None:
    async def test(cluster: RouterCluster) -> None:
        await with_small(cluster, is_granted=False)
        answer = await cluster.ask(text_request("hi"))
        assert answer.error is None
        assert cluster.scheduler.enqueued[-1].pool == "", "as in a cluster of one pool"

    simulate(test)


def test_an_adapter_is_of_its_pool() -> None:
    async def test(cluster: RouterCluster) -> None:
        worker = await with_small(cluster)
        record = AdapterRecord("acme", "mine", "c" * 64, 8, 1000, ("q_proj",), 1.0, pool="small", base_digest=SMALL)
        await cluster.store.put(keys.adapter("acme", "mine"), record.to_json())
        await until(lambda: "acme/mine" in cluster.app.directory.adapters)
        assert (await cluster.ask(text_request("hi"), x_adapter_id="mine")).error is None
        assert worker.executed[-1].adapter_uid == f"{'c' * 64}@acme"
        assert cluster.scheduler.enqueued[-1].adapter_rank == 8
        for model, name in (("tiny", "mine"), ("small", "upper")):
            told = await cluster.ask(text_request("hi", model=model), x_adapter_id=name)
            assert told.error is not None
            assert told.error.code is Code.INVALID_ARGUMENT
            assert "has another base model" in told.error.message
        told = await cluster.ask(text_request("hi"), x_adapter_id="mine+upper")
        assert told.error is not None
        assert "'mine' is of pool small and 'upper' of default" in told.error.message

    simulate(test)


def test_an_adapter_is_validated_by_its_pools_workers() -> None:
    async def test(cluster: RouterCluster) -> None:
        worker = await with_small(cluster)

        async def add(name: str, pool: str) -> Any:
            header = admin_pb2.AddAdapterHeader(tenant_id="acme", name=name, pool=pool)
            return await upload(cluster, admin_pb2.AddAdapterRequest(header=header), *GOOD)

        added = await add("mine", "small")
        assert added.adapter.pool == "small"
        assert len(worker.validated) == 1
        assert [w.validated for w in cluster.workers] == [[], []]
        assert cluster.app.directory.adapters["acme/mine"].record.base_digest == SMALL
        assert (await add("mine", "")).adapter.pool == "small", "as its other versions"
        for name, pool, problem in (
            ("mine", "default", "the other versions of mine are of pool small"),
            ("new", "third", "'third' is not known to this tenant"),
        ):
            with pytest.raises(Exception, match=problem):
                await add(name, pool)

    simulate(test)


def test_models_are_listed_by_pool() -> None:
    async def test(cluster: RouterCluster) -> None:
        await with_small(cluster)
        told = await cluster.client.call(
            LIST_MODELS, inference_pb2.ListModelsRequest(), metadata={"x-tenant-id": "acme"}
        )
        rows = [(each.name, each.pool, each.base_model, each.max_context_tokens) for each in told.pools]
        assert rows == [("tiny", "default", "tiny", 256), ("mini", "small", "mini", 64)]
        assert (told.base_model, told.max_context_tokens) == ("tiny", 256)
        told = await cluster.client.call(
            LIST_MODELS, inference_pb2.ListModelsRequest(), metadata={"x-tenant-id": "other"}
        )
        assert [each.pool for each in told.pools] == ["default"]

    simulate(test)


async def test_http_names_pools_by_model() -> None:
    async with http_front() as front, front.openai() as client:
        worker = await with_small(front.cluster)

        async def post(path: str, **body: object) -> Any:
            return await client.post(f"{front.url}{path}", cast_to=dict, body=body)

        for model in ("mini", "small"):
            document = await post("/v1/completions", model=model, prompt="hi", max_tokens=4)
            # the worker says `mini` in the default pool's tokens, which are three further
            assert (document["model"], document["choices"][0]["text"]) == (model, "plql")
            assert document["system_fingerprint"] == f"fp_{worker.record('127.0.0.1:1').fingerprint[:10]}"
        assert list(worker.executed[-1].prompt_token_ids) == list(b"hi")
        models = (await client.get("/models", cast_to=dict))["data"]
        told = {row["id"]: (row["root"], row["parent"], row["max_model_len"]) for row in models}
        assert told["tiny"] == ("tiny", None, 256)
        assert told["mini"] == ("mini", None, 64)
        assert told["upper"][1:] == ("tiny", 256)
        tokens = await post("/tokenize", model="small", prompt="hi")
        assert (tokens["tokens"], tokens["max_model_len"]) == (list(b"hi"), 64)
        with pytest.raises(openai.BadRequestError, match="has another base model"):
            await post("/v1/completions", model="small:upper", prompt="hi")


def test_a_pool_without_workers_is_said_to_have_none() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "pools: [default, small]\n")
        await until(lambda: len(cluster.app.directory.pools_of(TenantId("acme"))) > 1)
        told = await cluster.ask(text_request("hi", model="small"))
        assert told.error is not None
        assert (told.error.code, told.error.message) == (
            Code.UNAVAILABLE,
            "no worker has joined pool small yet",
        )

    simulate(test)


DEGRADES = POOLS + "degrade: [shorter_outputs, {smaller_pool: small}, no_stream]\n"


async def overloaded(cluster: RouterCluster, level: int) -> None:
    """The default pool: acme asks for far more than its share."""
    await cluster.put_tenant("acme", DEGRADES)
    told = scheduler_pb2.Overload(level=level)
    told.tenants.add(tenant_id="acme", interactive_shares=1e3, standard_shares=1e3, batch_shares=1e3)
    told.limit_shares = 1e6
    await until(lambda: cluster.app.scheduler.is_connected)
    cluster.scheduler._lines[-1].outbox.put_nowait(scheduler_pb2.ScheduleResponse(overload=told))
    directory = cluster.app.directory
    await until(lambda: cluster.app.scheduler.overload("default").level == level)
    await until(lambda: bool((policy := directory.policy_of(TenantId("acme"))) and policy.degrade.steps))


def test_overload_takes_what_the_policy_lets_it() -> None:
    async def test(cluster: RouterCluster) -> None:
        await with_small(cluster)
        await overloaded(cluster, 64)
        answer = await cluster.ask(text_request("hi", max_tokens=30))
        assert answer.error is None
        (told,) = (frame.started.degraded for frame in answer.frames if frame.HasField("started"))
        assert (told.pool, told.asked_pool, told.not_streamed, told.overload_level) == ("small", "default", True, 64)
        assert (told.max_tokens, told.asked_max_tokens) == (30, 30), "as short as that anyway"
        assert answer.finished.degraded == told
        assert cluster.scheduler.enqueued[-1].pool == "small"
        plain = await cluster.ask(text_request("hi", max_tokens=30), x_tenant_id="other")
        assert not plain.finished.HasField("degraded"), "who is within its share"

    simulate(test)


@pytest.mark.parametrize(
    "stays",
    [
        {"token_ids": inference_pb2.TokenIds(ids=[5, 6])},
        {"text": "hi", "stop_token_ids": [9]},
        {"text": "x" * 64},
        {"text": "hi", "max_tokens": 80},
        {"text": "hi", "model": "tiny", "x_adapter_id": "upper"},
    ],
)
def test_what_may_not_fit_another_model_stays(stays: dict[str, Any]) -> None:
    async def test(cluster: RouterCluster) -> None:
        await with_small(cluster, is_granted=False)
        await overloaded(cluster, 40)
        named = {"x_adapter_id": stays["x_adapter_id"]} if "x_adapter_id" in stays else {}
        fields = {name: value for name, value in stays.items() if name != "x_adapter_id"}
        answer = await cluster.ask(inference_pb2.GenerateRequest(**fields), **named)
        assert answer.error is None
        assert cluster.scheduler.enqueued[-1].pool == ""
        assert not answer.finished.degraded.pool

    simulate(test)


def test_answers_get_shorter_and_again_longer() -> None:
    async def test(cluster: RouterCluster) -> None:
        await with_small(cluster, is_granted=False)
        await overloaded(cluster, 64)
        short = await cluster.ask(text_request("hi", max_tokens=200, stop_token_ids=[9]))
        assert short.error is None
        told = short.finished.degraded
        cap = Taken(64, (Step.SHORTER_OUTPUTS,)).max_tokens
        assert (told.max_tokens, told.asked_max_tokens) == (cap, 200)
        assert cluster.scheduler.enqueued[-1].max_new_tokens == cap
        quiet = scheduler_pb2.ScheduleResponse(overload=scheduler_pb2.Overload())
        cluster.scheduler._lines[-1].outbox.put_nowait(quiet)
        await until(lambda: cluster.app.scheduler.overload("default").is_quiet)
        whole = await cluster.ask(text_request("hi", max_tokens=200))
        assert not whole.finished.HasField("degraded")
        assert cluster.scheduler.enqueued[-1].max_new_tokens == 200

    simulate(test)


async def test_http_tells_what_overload_took() -> None:
    async with http_front() as front, front.openai() as client:
        await with_small(front.cluster)
        await overloaded(front.cluster, 64)
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True
        )
        assert "pool=" not in raw.headers["x-degraded"], "who asks for log-probabilities asks for this model's tokens"
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="hi", max_tokens=4)
        assert raw.headers["x-degraded"] == (
            "max_tokens=4, asked_max_tokens=4, overload_level=64, pool=small, asked_pool=default, not_streamed"
        )
