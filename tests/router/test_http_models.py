"""Models, and whether they are served."""

from __future__ import annotations

import openai
import pytest
from http_fakes import http_front
from manylora.v1 import inference_pb2
from manylora_shared.coordination import keys
from manylora_shared.ids import QosClass, TenantId
from openai.types import Model
from router_fakes import LIST_MODELS, until


async def test_the_base_and_the_callers_adapters() -> None:
    async with http_front() as front, front.openai() as client:
        raw = await client.models.with_raw_response.list()
        found = [Model.model_validate(row, strict=True) for row in raw.http_response.json()["data"]]
        assert [model.id for model in found] == ["tiny", "upper"]
        assert [(row["root"], row["parent"]) for row in raw.http_response.json()["data"]] == [
            ("tiny", None),
            ("a" * 64, "tiny"),
        ]
        assert raw.http_response.json()["data"][0]["max_model_len"] == 256
        for name in ("upper", "tiny:upper"):
            assert (await client.models.retrieve(name)).id == "upper"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("secret")  # another tenant's


async def test_a_composition_of_the_policy_is_among_them() -> None:
    async with http_front() as front, front.openai() as client:
        store = front.cluster.store
        kv = await store.get(keys.tenant("acme"))
        assert kv is not None
        await store.put(kv.key, kv.value + b"\nadapters: {compose: {loud: 'upper:0.5', upper: 'lower', none: 'x'}}\n")
        await until(lambda: bool(front.cluster.app.directory.policy_of(TenantId("acme")).compositions))
        rows = (await client.models.with_raw_response.list()).http_response.json()["data"]
        assert [(row["id"], row["root"], row["parent"]) for row in rows[2:]] == [("loud", "upper:0.5", "tiny")]
        told = await front.cluster.client.call(
            LIST_MODELS, inference_pb2.ListModelsRequest(), metadata={"x-tenant-id": "acme"}
        )
        assert list(told.adapters) == ["loud", "none", "upper"]


async def test_health_and_readiness_need_no_key() -> None:
    async with http_front() as front, openai.AsyncOpenAI(base_url=front.url, api_key="none", max_retries=0) as client:
        for path in ("/health", "/ping", "/ready", "/version"):
            assert isinstance(await client.get(path, cast_to=dict), dict)
        front.cluster.scheduler.drop_lines()
        assert front.cluster.scheduler.server is not None
        await front.cluster.scheduler.server.stop(0.0)
        await until(lambda: not front.cluster.app.scheduler.is_connected)
        with pytest.raises(openai.InternalServerError) as unready:
            await client.get("/ready", cast_to=dict)
        assert unready.value.status_code == 503


async def test_lists_are_made_in_turns_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's calls for a list of thousands, all answered in one pass of the event loop, held up everybody."""
    async with http_front() as front, front.openai() as client:
        intake, asked = front.cluster.app.intake, []
        take_turn = intake.take_turn

        async def counted(tenant: str, qos_class: QosClass | None) -> None:
            asked.append(tenant)
            await take_turn(tenant, qos_class)

        monkeypatch.setattr(intake, "take_turn", counted)
        await client.models.list()
        await client.models.retrieve("upper")
        await front.cluster.client.call(
            LIST_MODELS, inference_pb2.ListModelsRequest(), metadata={"x-tenant-id": "acme"}
        )
        assert asked == ["acme"] * 3
