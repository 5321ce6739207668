"""The quality gate through the router's own services: what is worse is kept and never served, what is better is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_router.admin import quality_gate
from manylora_router.admin.asking import Inconclusive
from manylora_router.admin.quality_gate import in_a_process
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import AdapterUid, digest_of
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from router_fakes import STARTED, RouterCluster, Script, finished, say, simulate, text_request
from test_admin_adapters import CONFIG, call, chunk, header, upload

NAME = {"tenant_id": "acme", "name": "lower"}
POLICY = "adapters:\n  gate: {samples: golden, min_score: 0.5, max_drop: 0, min_gain: 0.25, timeout_s: 20}\n"
SAMPLES = "\n".join(json.dumps({"prompt": f"say {i}", "expected": "good"}) for i in range(4)).encode()


class Answers:
    """What each adapter says, by its digest; the base model says `base`."""

    def __init__(self) -> None:
        self.by_digest: dict[str, str] = {}
        self.seen: list[tuple[str, int]] = []  # (digest, class)
        self.before: Callable[[worker_pb2.ExecuteRequest], Script | None] = lambda request: None

    async def __call__(self, request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        digest = digest_of(AdapterUid(request.adapter_uid))
        self.seen.append((digest, request.qos_class))
        script = self.before(request) or say(self.by_digest.get(digest, "base"))
        async for response in script(request):
            yield response


def files(weights: bytes) -> list[Any]:
    return [chunk(CONFIG_NAME, CONFIG), chunk(WEIGHTS_NAME, weights)]


async def add(cluster: RouterCluster, answers: Answers, weights: bytes, answer: str) -> Any:
    """Registers an adapter that answers so, whatever its bytes are."""
    incoming = await cluster.files.begin()
    await cluster.files.append(incoming, CONFIG_NAME, CONFIG)
    await cluster.files.append(incoming, WEIGHTS_NAME, weights)
    answers.by_digest[await cluster.files.finish(incoming)] = answer
    await cluster.files.discard(incoming)
    return (await upload(cluster, header(), *files(weights))).adapter


async def gated(cluster: RouterCluster, policy: str = POLICY) -> None:
    await cluster.put_tenant("acme", policy)
    await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=SAMPLES)


async def report_of(cluster: RouterCluster, number: int = 0) -> dict[str, Any]:
    return json.loads((await call(cluster, "GetAdapterReport", **NAME, number=number)).report)


def run(test: Callable[[RouterCluster, Answers], Any]) -> None:
    answers = Answers()

    async def with_answers(cluster: RouterCluster) -> None:
        await gated(cluster)
        await test(cluster, answers)

    simulate(with_answers, script=answers)


def test_a_worse_version_is_kept_with_its_report_and_never_served() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        first = await add(cluster, answers, b"one", "good")
        assert (first.number, first.state) == (1, "")
        with pytest.raises(RpcError) as error:
            await add(cluster, answers, b"two", "bad")
        assert error.value.code is Code.FAILED_PRECONDITION
        assert "version 2 of lower is rejected and not served" in error.value.message
        report = await report_of(cluster)
        assert report["verdict"] == "rejected"
        assert report["quality"]["scores"] == {"candidate": 0.0, "before": 1.0, "base": 0.0}
        assert [shown["sample"] for shown in report["quality"]["shown"]] == [1, 2, 3, 4]
        assert report["quality"]["shown"][0]["answers"]["candidate"] == {"answer": "bad", "score": 0.0}
        assert {stage["stage"]: stage["state"] for stage in report["stages"]} == {
            "format": "passed", "compatibility": "passed", "coverage": "passed", "trial": "passed",
            "quality": "failed", "load": "skipped",
        }  # fmt: skip
        line = (await call(cluster, "GetAdapterLine", **NAME)).line
        assert [(v.number, v.state) for v in line.versions] == [(1, ""), (2, "rejected")]
        assert (line.in_force, line.events[-1].change) == (1, "reject")
        assert (await cluster.ask(text_request(), x_adapter_id="lower")).text == "good"
        for method, more in (("PromoteAdapter", {"to": 2}), ("RolloutAdapter", {"to": 2, "percent": 5})):
            with pytest.raises(RpcError) as error:
                await call(cluster, method, **NAME, **more)
            assert error.value.code is Code.INVALID_ARGUMENT
        asked = await cluster.ask(text_request(), x_adapter_id="lower@2")
        assert asked.error is not None
        assert asked.error.code is Code.NOT_FOUND
        third = await add(cluster, answers, b"three", "good")
        assert (third.number, third.state) == (3, "")
        assert {qos for uid, qos in answers.seen if uid == third.version} == {common_pb2.QOS_CLASS_BATCH}
        load = (await report_of(cluster))["load"]
        assert load["candidate"]["size_bytes"] == load["before"]["size_bytes"] == 1000
        assert load["candidate"]["requests"] == 8

    run(test)


def test_a_first_version_that_fails_has_a_name_that_nobody_can_ask_for_until_a_good_one_comes() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        with pytest.raises(RpcError):
            await add(cluster, answers, b"one", "bad")
        asked = await cluster.ask(text_request(), x_adapter_id="lower")
        assert asked.error is not None
        assert asked.error.code is Code.NOT_FOUND
        good = await add(cluster, answers, b"two", "good")
        assert good.number == 2
        assert (await cluster.ask(text_request(), x_adapter_id="lower")).text == "good"
        assert "before" not in (await report_of(cluster, 2))["quality"]["scores"]
        stored = await cluster.store.get(keys.adapter("acme", "lower"))
        assert stored is not None
        assert b"say 1" not in stored.value
        assert AdapterRecord.stored(stored).line.in_force.number == 2

    run(test)


def test_a_lost_worker_is_tried_again_and_lost_again_and_again_it_is_inconclusive() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        lost: list[str] = []

        async def lose(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            yield STARTED
            await asyncio.sleep(0.01)
            yield finished(1, common_pb2.OUTCOME_WORKER_LOST, "it went away")

        def once(request: worker_pb2.ExecuteRequest) -> Script | None:
            if lost:
                return None
            lost.append(request.request_id)
            return lose

        answers.before = once
        assert (await add(cluster, answers, b"one", "good")).number == 1
        assert len(lost) == 1
        answers.before = lambda request: lose if request.adapter_uid[:64] not in ("", first) else None
        first = (await call(cluster, "GetAdapterLine", **NAME)).line.versions[0].version
        with pytest.raises(RpcError) as error:
            await add(cluster, answers, b"two", "good")
        assert error.value.code is Code.UNAVAILABLE
        report = await report_of(cluster)
        assert report["verdict"] == "inconclusive"
        assert "quality" not in report
        line = (await call(cluster, "GetAdapterLine", **NAME)).line
        assert [(v.number, v.state) for v in line.versions] == [(1, ""), (2, "inconclusive")]

    run(test)


def test_what_does_not_run_is_rejected_and_what_takes_too_long_is_inconclusive() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        await add(cluster, answers, b"one", "good")
        known = set(answers.by_digest)

        async def fail(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            yield STARTED
            yield finished(1, common_pb2.OUTCOME_ADAPTER_FAILED, "its weights overflow")

        async def hang(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            yield STARTED
            await asyncio.sleep(1000)

        for script, state, told in ((fail, "rejected", "its weights overflow"), (hang, "inconclusive", "in 20 s")):
            answers.before = lambda r, s=script: s if r.adapter_uid and r.adapter_uid[:64] not in known else None
            with pytest.raises(RpcError) as error:
                await add(cluster, answers, state.encode(), "good")
            assert told in error.value.message
            assert (await report_of(cluster))["verdict"] == state

    run(test)


def test_samples_that_are_not_there_or_lack_something_let_nothing_through() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        await call(cluster, "RemoveSamples", tenant_id="acme", name="golden")
        with pytest.raises(RpcError) as error:
            await add(cluster, answers, b"one", "good")
        assert error.value.code is Code.FAILED_PRECONDITION
        assert "has no samples 'golden'" in error.value.message
        assert keys.adapter("acme", "lower") not in cluster.store_server.keys
        await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=b'{"prompt": "a"}')
        with pytest.raises(RpcError) as error:
            await add(cluster, answers, b"one", "good")
        assert "sample 1: expected must be a text" in error.value.message
        assert (await report_of(cluster))["verdict"] == "inconclusive"

    run(test)


def test_perplexity_is_of_the_expected_text() -> None:
    async def test(cluster: RouterCluster, answers: Answers) -> None:
        await cluster.put_tenant("acme", "adapters:\n  gate: {samples: golden, judge: perplexity, min_score: 0.9}\n")
        await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=SAMPLES)
        assert (await add(cluster, answers, b"one", "bad")).number == 1
        quality = (await report_of(cluster))["quality"]
        assert quality["scores"] == {"candidate": 1.0, "base": 1.0}  # the fake's log-probabilities are 0

    run(test)


def test_patterns_and_schemas_are_judged_in_a_process_with_bounds() -> None:
    asked = [("regex", "a+", "aaa"), ("json_schema", {"type": "integer"}, "7"), ("regex", "(", "x")]
    scores = in_a_process(asked)
    assert scores[:2] == [1.0, 1.0]
    assert isinstance(scores[2], str)


def test_a_pattern_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_gate, "JUDGE_S", 1.0)
    with pytest.raises(Inconclusive):
        in_a_process([("regex", "(a+)+$", "a" * 64 + "b")])
