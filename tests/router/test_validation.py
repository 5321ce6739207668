"""From files to a verdict: reports of adapters that pass without a gate, and checks that register nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from manylora.v1 import admin_pb2, inference_pb2, worker_pb2
from manylora_router.app import FILES_GRACE_S, HOUSEKEEPING_S
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from router_fakes import ADMIN, LIST_MODELS, RouterCluster, simulate, text_request
from test_admin_adapters import GOOD, call, chunk, header, upload
from test_quality_gate import Answers, report_of, run

NAME = {"tenant_id": "acme", "name": "lower"}
COVERAGE = worker_pb2.AdapterCoverage(
    modules=[worker_pb2.ChangedModule(path="layers.0.q_proj", rank=8)],
    layers=28,
    tensors=3,
    tensors_left_out=1,
    left_out=["vision.q"],
)


async def check(cluster: RouterCluster, *messages: Any) -> tuple[bool, dict[str, Any]]:
    stream = cluster.client.stream(ADMIN["CheckAdapter"])
    for message in messages:
        await stream.write(_as_check(message))
    await stream.close_send()
    answer = await stream.read()
    return answer.passed, json.loads(answer.report)


def header_of(**fields: str) -> admin_pb2.AddAdapterRequest:
    return admin_pb2.AddAdapterRequest(header=admin_pb2.AddAdapterHeader(tenant_id="acme", **fields))


def _as_check(message: admin_pb2.AddAdapterRequest) -> admin_pb2.CheckAdapterRequest:
    return admin_pb2.CheckAdapterRequest.FromString(message.SerializeToString())


def states(report: dict[str, Any]) -> dict[str, str]:
    return {each["stage"]: each["state"] for each in report["stages"]}


def test_without_a_gate_a_version_has_a_report_of_what_it_changes_and_nothing_is_asked() -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.validation.coverage.CopyFrom(COVERAGE)
        added = (await upload(cluster, header(), *GOOD)).adapter
        report = await report_of(cluster)
        assert (report["verdict"], report["digest"]) == ("passed", added.version)
        assert report["modules"] == [{"path": "layers.0.q_proj", "rank": 8}]
        assert report["coverage"] == {"layers": 28, "tensors": 3, "tensors_left_out": 1, "left_out": ["vision.q"]}
        assert report["base"]["digest"] == "0" * 64
        assert (states(report)["coverage"], states(report)["quality"]) == ("passed", "skipped")
        assert sum(len(worker.executed) for worker in cluster.workers) == 0
        assert (await upload(cluster, header(), *GOOD)).adapter == added
        assert len(cluster.documents.kept) == 1

    simulate(test)


def test_a_check_registers_nothing_and_tells_what_is_wrong_as_a_report() -> None:
    async def test(cluster: RouterCluster) -> None:
        passed, report = await check(cluster, header_of(), *GOOD)
        assert (passed, report["name"], states(report)["load"]) == (True, "", "passed")
        assert keys.adapter("acme", "lower") not in cluster.store_server.keys
        assert cluster.documents.kept == {}
        passed, report = await check(cluster, header_of(), chunk("adapter_config.json", b"{}"))
        assert (passed, states(report)["format"], report["digest"]) == (False, "failed", "")
        assert report["problems"][0]["field"] == "adapter_model.safetensors"
        problem = worker_pb2.AdapterProblem(field="target_modules", description="matches nothing")
        for was_tried, stage in ((False, "compatibility"), (True, "trial")):
            for worker in cluster.workers:
                worker.validation = worker_pb2.ValidateAdapterResponse(problems=[problem], was_tried=was_tried)
            passed, report = await check(cluster, header_of(), *GOOD)
            assert (passed, states(report)[stage]) == (False, "failed")
            assert report["reasons"] == ["target_modules: matches nothing"]
        with pytest.raises(RpcError) as error:
            await check(cluster, header_of(judge="taste"), *GOOD)
        assert [v.field for v in error.value.violations] == ["header.judge"]
        key = await cluster.put_key(tenant="other", scopes=("admin",))
        stream = cluster.caller(key).stream(ADMIN["CheckAdapter"])
        await stream.write(_as_check(header_of()))
        await stream.close_send()
        with pytest.raises(RpcError) as error:
            await stream.read()
        assert error.value.code is Code.PERMISSION_DENIED

    simulate(test)


def test_a_check_judges_the_samples_that_come_with_it_against_the_version_in_force() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        incoming = await cluster.files.begin()
        for message in GOOD:
            await cluster.files.append(incoming, message.chunk.file_name, message.chunk.data)
        answers.by_digest[await cluster.files.finish(incoming)] = "some good answer"
        samples = chunk("samples.jsonl", b'{"prompt": "a", "expected": "good"}\n')
        passed, report = await check(cluster, header_of(judge="contains"), *GOOD, samples)
        assert (passed, report["quality"]["scores"]) == (True, {"candidate": 1.0, "base": 0.0})
        assert report["quality"]["rule"]["min_gain"] == 0.25
        passed, report = await check(cluster, header_of(), *GOOD)  # by the policy's: exactly "good"
        assert (passed, report["verdict"], report["quality"]["samples"]["name"]) == (False, "rejected", "golden")
        answers.by_digest["a" * 64] = "good"  # that of acme's adapter upper
        passed, report = await check(cluster, header_of(name="upper"), *GOOD, samples)
        assert report["quality"]["scores"] == {"candidate": 0.0, "before": 1.0, "base": 0.0}
        for wrong in (
            [header_of(), *GOOD, chunk("samples.jsonl", b"{")],
            [header_of(judge="contains"), *GOOD],  # the policy's samples have their own
        ):
            with pytest.raises(RpcError) as error:
                await check(cluster, *wrong)
            assert error.value.code is Code.INVALID_ARGUMENT

    run(test)


def test_reports_go_with_their_versions_and_samples_with_their_tenant() -> None:
    async def test(cluster: RouterCluster) -> None:
        await upload(cluster, header(), *GOOD)
        await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=b'{"prompt": "a"}')
        await call(cluster, "PutSamples", tenant_id="other", name="golden", samples=b'{"prompt": "a"}')
        await call(cluster, "RemoveAdapter", **NAME)
        cluster.clock.advance(FILES_GRACE_S + 1)
        await asyncio.sleep(2 * HOUSEKEEPING_S + 1)
        assert [path.split("/")[2] for path in cluster.documents.kept] == ["samples", "samples"]
        await call(cluster, "DeleteTenant", tenant_id="acme")
        assert list(cluster.documents.kept) == ["documents/other/samples/golden"]

    simulate(test)


def test_a_model_without_served_versions_is_listed_to_nobody() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        with pytest.raises(RpcError):
            await upload(cluster, header(), *GOOD)
        request, metadata = inference_pb2.ListModelsRequest(), {"x-tenant-id": "acme"}
        models = await cluster.client.call(LIST_MODELS, request, metadata=metadata)
        assert list(models.adapters) == ["upper"]
        assert (await cluster.ask(text_request(), x_adapter_id="lower")).error is not None

    run(test)
