"""WorkerService over the in-memory transport, on the fake engine."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.memory import MemoryStoreServer
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import Code, FieldViolation, RpcError
from manylora_shared.ids import AdapterUid, QosClass, TenantId
from manylora_shared.simulation import loop as simulation
from manylora_shared.telemetry import Attribute, MetricName, SpanName, Telemetry
from manylora_shared.transport.base import Stream
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_worker import engine_view
from manylora_worker import tenants as tenants_module
from manylora_worker.adapters.pins import NO_ROOM_TO_PIN
from manylora_worker.control import ControlSession
from manylora_worker.engine.api import AdapterTier
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import Setbacks
from manylora_worker.engine.fake_runner import FakeAdapterBackend, FakeRunner, reference_tokens
from manylora_worker.engine_view import EnginePost, EngineView
from manylora_worker.engines import engine_limits
from manylora_worker.output_stream import PAUSE_UNREAD_TOKENS
from manylora_worker.validation import FakeValidator

from tests.worker.worker_fakes import (
    MODEL,
    OTHER_UID,
    STOP_CHOICE,
    UID,
    VALIDATE,
    Worker,
    collect,
    config,
    eventually,
    make_engine,
    message,
    running_worker,
)

PROMPT = (5, 6, 7)


async def refused(call: Awaitable[Any]) -> RpcError:
    with pytest.raises(RpcError) as error:
        await call
    return error.value


# -- Execute


async def test_a_request_over_grpc_on_the_engines_thread() -> None:
    async with running_worker(transport=GrpcTransport(), threaded=True) as worker:
        result = await collect(worker.execute(message(adapter_uid=UID, max_tokens=30)))
        assert result.tokens == {0: reference_tokens(PROMPT, UID, 3, 0, 30)}
        assert result.finish == {0: common_pb2.FINISH_REASON_LENGTH}
        assert result.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert result.finished.decode_ms > 0
        assert result.finished.prefill_ms > 0


async def test_choices_stop_tokens_and_logprobs() -> None:
    async with running_worker(eos_token_id=0) as worker:
        sampling = common_pb2.SamplingParams(seed=9, top_logprobs=2)
        result = await collect(
            worker.execute(message(n=3, max_tokens=400, stop_token_ids=[0], sampling=sampling, adapter_uid=UID))
        )
        for choice in range(3):
            want = reference_tokens(PROMPT, UID, 9, choice, 400, eos_token_id=0, stop_token_ids=[0])
            assert result.tokens[choice] == want
            assert len(want) < 400, "the test wants a stop"
            assert result.finish[choice] == common_pb2.FINISH_REASON_STOP
            assert result.stop_token_ids[choice] == 0
        assert result.finished.outcome == common_pb2.OUTCOME_COMPLETED


async def test_logprobs_come_one_a_token() -> None:
    async with running_worker() as worker:
        stream = worker.execute(message(sampling=common_pb2.SamplingParams(seed=9, top_logprobs=2)))
        seen = 0
        while (frame := await stream.read()) is not None:
            for choice in frame.tokens.choices:
                assert len(choice.logprobs) == len(choice.token_ids)
                for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
                    assert position.top[0].token_id == token_id
                    assert len(position.top) == 2
                    seen += 1
        assert seen == 8


async def test_emitted_tokens_are_continued_and_not_sent_again() -> None:
    async with running_worker() as worker:
        whole = reference_tokens(PROMPT, None, 3, 0, 8)
        stream = worker.execute(message(emitted_token_ids=whole[:5]))
        await stream.read()
        frame = await stream.read()
        assert frame.tokens.choices[0].first_position == 5
        tokens = list(frame.tokens.choices[0].token_ids)
        while (frame := await stream.read()) is not None:
            for choice in frame.tokens.choices:
                tokens += choice.token_ids
        assert tokens == whole[5:]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"tenant_id": ""}, "tenant_id"),
    ({"tenant_id": "../etc"}, "tenant_id"),
    ({"qos_class": common_pb2.QOS_CLASS_UNSPECIFIED}, "qos_class"),
    ({"qos_class": 77}, "qos_class"),
    ({"adapter_uid": "../../x"}, "adapter_uid"),
    ({"adapter_uid": "AB" * 32}, "adapter_uid"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [259]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1] * 8192}, "prompt_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**32 - 1}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"stop_token_ids": [1, 259]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"emitted_token_ids": [1], "n": 2}, "emitted_token_ids"),
    ({"emitted_token_ids": [1] * 8}, "emitted_token_ids"),
    ({"emitted_token_ids": [259]}, "emitted_token_ids"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"seed": None}, "seed"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {259: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
]


async def test_every_bad_field_is_named() -> None:
    async with running_worker() as worker:
        for changes, field in BAD_FIELDS:
            error = await refused(worker.execute(message(**changes)).read())
            assert error.code is Code.INVALID_ARGUMENT, changes
            assert field in [v.field for v in error.violations], changes
        for values, field in BAD_SAMPLING:
            sampling = common_pb2.SamplingParams(**({"seed": 1} | values))
            error = await refused(worker.execute(message(sampling=sampling)).read())
            assert error.code is Code.INVALID_ARGUMENT, values
            assert [v.field for v in error.violations] == [f"sampling.{field}"], values
        error = await refused(worker.execute(message(n=0, tenant_id="", prompt_token_ids=[])).read())
        assert {v.field for v in error.violations} == {"n", "tenant_id", "prompt_token_ids"}


async def test_what_the_worker_could_never_hold_is_refused() -> None:
    async with running_worker(settings=config(num_blocks=2)) as worker:
        error = await refused(worker.execute(message(max_tokens=64)).read())
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "max_tokens")


async def test_a_request_id_runs_once_at_a_time() -> None:
    async with running_worker() as worker:
        first = worker.execute(message(max_tokens=3000))
        await first.read()
        assert (await refused(worker.execute(message()).read())).code is Code.ALREADY_EXISTS
        first.cancel()
        await eventually(lambda: not worker.engine.runtime.view.running)
        assert (await collect(worker.execute(message()))).finished.outcome == common_pb2.OUTCOME_COMPLETED


async def test_cancelling_frees_the_work() -> None:
    async with running_worker() as worker:
        stream = worker.execute(message(max_tokens=8000, adapter_uid=UID))
        await stream.read()
        await stream.read()
        stream.cancel()
        await eventually(lambda: worker.engine.core.stats().requests == 0)
        assert worker.engine.core.stats().generated_tokens < 4000


async def test_stop_choice_ends_one_choice_and_the_others_go_on() -> None:
    async with running_worker() as worker:
        stream = worker.execute(message(n=2, max_tokens=300))
        await stream.read()
        await worker.channel.call(STOP_CHOICE, worker_pb2.StopChoiceRequest(request_id="r1", choice=1))
        result = await collect_rest(stream)
        assert result[0] == 300
        assert result[1] < 300
        error = await refused(stop_out_of_range(worker))
        assert error.violations[0].field == "choice"
        await worker.channel.call(STOP_CHOICE, worker_pb2.StopChoiceRequest(request_id="gone", choice=0))


async def collect_rest(stream: Stream) -> dict[int, int]:
    counts: dict[int, int] = {0: 0, 1: 0}
    while (frame := await stream.read()) is not None:
        for choice in frame.tokens.choices:
            counts[choice.choice] += len(choice.token_ids)
    return counts


async def stop_out_of_range(worker: Worker) -> None:
    stream = worker.execute(message("wide", max_tokens=3000))
    await stream.read()
    try:
        await worker.channel.call(STOP_CHOICE, worker_pb2.StopChoiceRequest(request_id="wide", choice=1))
    finally:
        stream.cancel()


async def test_a_failed_adapter_is_told_with_the_last_frame() -> None:
    def broken(uid: AdapterUid, tier: AdapterTier) -> str | None:
        return "its digest is wrong" if uid == OTHER_UID else None

    async with running_worker(error_of=broken) as worker:
        bad, good = await asyncio.gather(
            collect(worker.execute(message("bad", adapter_uid=OTHER_UID))),
            collect(worker.execute(message("good", adapter_uid=UID))),
        )
        assert bad.finished.outcome == common_pb2.OUTCOME_ADAPTER_FAILED
        assert bad.finished.message == "its digest is wrong"
        assert bad.tokens == {}
        assert good.finished.outcome == common_pb2.OUTCOME_COMPLETED


def test_frames_are_fewer_than_tokens_when_streams_are_many() -> None:
    async def main() -> None:
        async with running_worker(settings=config(sequence_slots=32), step_s=0.001) as worker:
            results = await asyncio.gather(
                *(
                    collect(worker.execute(message(f"r{i}", max_tokens=100, prompt_token_ids=[i + 1])))
                    for i in range(32)
                )
            )
            for i, result in enumerate(results):
                assert result.tokens[0] == reference_tokens([i + 1], None, 3, 0, 100)
            frames = sum(result.token_frames for result in results)
            assert 32 * 4 < frames < 32 * 6, "of 100 ms, the first token's, one in 32 to 43 ms, and the last"

    simulation.run(main(), seed=1)


async def test_a_reader_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_PAUSE_S", 0.3)
    async with running_worker(step_s=0.0) as worker:
        stream = worker.execute(message(max_tokens=8000, sampling=common_pb2.SamplingParams(seed=1, top_logprobs=20)))
        await eventually(lambda: bool(worker.engine.runtime.view.running))
        await eventually(lambda: not worker.engine.runtime.view.running)
        result = await collect(stream)
        assert result.finished.outcome == common_pb2.OUTCOME_SLOW_READER
        assert PAUSE_UNREAD_TOKENS <= len(result.tokens[0]) < 8000


# -- Control


class Scheduler:
    """Reads one Control stream and folds its reports."""

    def __init__(self, worker: Worker) -> None:
        self.stream = worker.control()
        self.reports: list[worker_pb2.ControlReport] = []
        self.running: dict[str, int] = {}
        self.adapters: dict[str, int] = {}
        self.flows: dict[tuple[str, int], tuple[int, int]] = {}
        self.kv_blocks: dict[str, int] = {}
        self.setbacks: dict[str, worker_pb2.Setbacks] = {}
        self.times: list[float] = []

    async def hello(self, epoch: int) -> None:
        await self.send(hello=worker_pb2.ControlHello(epoch=epoch, scheduler_id="s"))

    async def send(self, **command: Any) -> None:
        await self.stream.write(worker_pb2.ControlCommand(**command))

    async def read(self) -> worker_pb2.ControlReport:
        report: worker_pb2.ControlReport = await self.stream.read()
        self.times.append(asyncio.get_running_loop().time())
        self.reports.append(report)
        if report.snapshot:
            self.running.clear()
            self.adapters.clear()
        for started in report.started:
            self.running[started.request_id] = started.sequences
        for request_id in report.finished_request_ids:
            del self.running[request_id]
        for adapter in report.adapters:
            if adapter.tier:
                self.adapters[adapter.adapter_uid] = adapter.tier
            else:
                del self.adapters[adapter.adapter_uid]
        for tenant in report.tenants:
            self.kv_blocks[tenant.tenant_id] = tenant.kv_blocks
        for setbacks in report.setbacks:
            self.setbacks[setbacks.tenant_id] = setbacks
        for flow in report.flows:
            self.flows[flow.tenant_id, flow.qos_class] = (flow.prompt_tokens, flow.output_tokens)
        return report

    async def read_until(self, condition: Callable[[worker_pb2.ControlReport], bool]) -> worker_pb2.ControlReport:
        async with asyncio.timeout(5):
            while True:
                report = await self.read()
                if condition(report):
                    return report


async def test_reports_tell_all_that_happens() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        first = await scheduler.read()
        assert first.snapshot
        assert (first.sequence_slots, first.max_sequences, first.running_sequences) == (8, 8 + 64, 0)
        assert (first.kv_blocks_total, first.kv_blocks_free, first.block_size) == (4096, 4096, 16)
        call = asyncio.create_task(collect(worker.execute(message(n=2, adapter_uid=UID, max_tokens=60))))
        report = await scheduler.read_until(lambda r: bool(r.started))
        assert report.running_sequences == 2
        assert scheduler.running == {"r1": 2}
        await scheduler.read_until(lambda r: any(flow.slotted_sequences == 2 for flow in r.flows))
        await scheduler.read_until(lambda r: "r1" in r.finished_request_ids)
        last = scheduler.reports[-1]
        assert last.running_sequences == 0
        assert last.kv_blocks_free == 4096
        assert last.generated_tokens == 120
        assert scheduler.adapters == {UID: worker_pb2.ADAPTER_TIER_DEVICE}
        assert scheduler.flows == {("acme", common_pb2.QOS_CLASS_STANDARD): (4, 120)}
        assert scheduler.running == {}
        assert scheduler.kv_blocks.get("acme", 0) == 0, "what it held is given back"
        await call
        assert len(scheduler.reports) < 40, "not one report a token"


async def test_reports_tell_what_tenants_hold_where_it_changed() -> None:
    limits = engine_limits(config())
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    session = ControlSession(view, sequence_slots=8, parked_sequences=0)
    told = []
    for held in ({"a": 3}, {"a": 4, "b": 1}, {"a": 4}, {}):
        view.kv_blocks = {TenantId(tenant): blocks for tenant, blocks in held.items()}
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        told.append({tenant.tenant_id: tenant.kv_blocks for tenant in report.tenants})
    assert told == [{"a": 3}, {"a": 4, "b": 1}, {"b": 0}, {"a": 0}]


async def test_reports_tell_what_befell_tenants_sequences_where_it_grew() -> None:
    limits = engine_limits(config())
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    sessions = [ControlSession(view, sequence_slots=8, parked_sequences=0) for _ in range(2)]

    def post(**setbacks: Setbacks) -> EnginePost:
        grown = {TenantId(tenant): each for tenant, each in setbacks.items()}
        return EnginePost([], [], view.stats, {}, grown, {}, None, None, None)

    async def told(session: ControlSession) -> dict[str, tuple[int, ...]]:
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        return {s.tenant_id: (s.preemptions, s.swaps_out, s.evictions, s.recomputed_tokens) for s in report.setbacks}

    early, late = sessions
    view.take(post(a=Setbacks(1, 2, 3, 4), b=Setbacks(preemptions=1), c=Setbacks(evictions=1)))
    assert await told(early) == {"a": (1, 2, 3, 4), "b": (1, 0, 0, 0), "c": (0, 0, 1, 0)}
    assert await told(early) == {}
    view.take(post(c=Setbacks(evictions=2)))
    view.take(post(a=Setbacks(1, 2, 3, 9)))
    assert await told(early) == {"c": (0, 0, 2, 0), "a": (1, 2, 3, 9)}
    view.take(post())
    assert await told(early) == {}
    assert await told(late) == {"a": (1, 2, 3, 9), "b": (1, 0, 0, 0), "c": (0, 0, 2, 0)}


async def test_reports_tell_where_adapters_are_where_that_changed() -> None:
    limits = engine_limits(config())
    core = EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits)
    view = EngineView(core.stats(), 8, lambda command: None)
    session = ControlSession(view, sequence_slots=8, parked_sequences=0)
    host, device = AdapterTier.HOST, AdapterTier.DEVICE
    told = []
    for there in ({"a": host}, {"a": device, "b": host}, {"a": device}, {"a": device, "c": host}):
        view.adapters = {AdapterUid(uid): tier for uid, tier in there.items()}
        session.engine_changed()
        report = await session.next_report()
        assert report is not None
        told.append({adapter.adapter_uid: adapter.tier for adapter in report.adapters})
    host_tier, device_tier = worker_pb2.ADAPTER_TIER_HOST, worker_pb2.ADAPTER_TIER_DEVICE
    gone = worker_pb2.ADAPTER_TIER_UNSPECIFIED
    assert told == [{"a": host_tier}, {"a": device_tier, "b": host_tier}, {"b": gone}, {"c": host_tier}]


async def test_the_answer_and_the_counters_tell_cached_tokens() -> None:
    async with running_worker() as worker:
        prompt = list(range(1, 41))
        cached = []
        for i, (tenant, uid) in enumerate([("acme", ""), ("acme", ""), ("other", ""), ("acme", UID)]):
            asked = message(f"r{i}", tenant_id=tenant, adapter_uid=uid, prompt_token_ids=prompt, max_tokens=2)
            cached.append((await collect(worker.execute(asked))).finished.cached_prompt_tokens)
        assert cached == [0, 32, 0, 0]
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
        standard = common_pb2.QOS_CLASS_STANDARD
        assert scheduler.flows == {("acme", standard): (40 + 8 + 40, 6), ("other", standard): (40, 2)}
    async with running_worker(settings=config(prefix_cache_share=0.0)) as worker:
        for i in range(2):
            result = await collect(worker.execute(message(f"r{i}", prompt_token_ids=prompt)))
            assert result.finished.cached_prompt_tokens == 0


def test_counters_alone_are_told_every_50_ms_and_room_at_once() -> None:
    async def main() -> None:
        async with running_worker(step_s=0.002) as worker:
            stream = worker.execute(message(max_tokens=8000))
            await stream.read()
            scheduler = Scheduler(worker)
            await scheduler.hello(1)
            assert (await scheduler.read()).started[0].request_id == "r1"
            for _ in range(5):
                await scheduler.read()
            gaps = [b - a for a, b in zip(scheduler.times[1:], scheduler.times[2:], strict=False)]
            assert all(0.04 < gap < 0.06 for gap in gaps)
            tokens = [r.generated_tokens for r in scheduler.reports]
            assert tokens == sorted(set(tokens))
            stream.cancel()
            began = asyncio.get_running_loop().time()
            await scheduler.read_until(lambda r: bool(r.finished_request_ids))
            assert scheduler.times[-1] - began < 0.02

    simulation.run(main(), seed=1)


async def test_prefetch_and_drain() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.send(prefetch=worker_pb2.PrefetchAdapter(adapter_uid=UID))
        await scheduler.read_until(lambda r: scheduler.adapters.get(UID) == worker_pb2.ADAPTER_TIER_DEVICE)
        running = worker.execute(message(max_tokens=50))
        await running.read()
        await scheduler.send(drain=worker_pb2.Drain())
        await scheduler.read_until(lambda r: r.draining)
        error = await refused(worker.execute(message("late")).read())
        assert error.code is Code.UNAVAILABLE
        assert "draining" in error.message
        await collect_rest(running)
        await scheduler.read_until(lambda r: "r1" in scheduler.reports[-1].finished_request_ids)


async def test_epochs_fence() -> None:
    async with running_worker() as worker:
        old, new = Scheduler(worker), Scheduler(worker)
        await old.hello(5)
        await old.read()
        await new.hello(6)
        assert (await new.read()).snapshot
        error = await refused(old.read())
        assert error.code is Code.FAILED_PRECONDITION
        late = Scheduler(worker)
        await late.hello(5)
        assert (await refused(late.read())).code is Code.FAILED_PRECONDITION
        error = await refused(worker.execute(message(epoch=5)).read())
        assert error.code is Code.FAILED_PRECONDITION
        await collect(worker.execute(message(epoch=6)))
        await collect(worker.execute(message(epoch=9)))
        again = Scheduler(worker)
        await again.hello(6)
        assert (await again.read()).snapshot


@pytest.mark.parametrize(
    ("commands", "field"),
    [
        ([{"drain": worker_pb2.Drain()}], "hello"),
        ([{}], "hello"),
        ([{"hello": worker_pb2.ControlHello(epoch=1)}, {"hello": worker_pb2.ControlHello(epoch=1)}], "command"),
        ([{"hello": worker_pb2.ControlHello(epoch=1)}, {}], "command"),
        (
            [{"hello": worker_pb2.ControlHello(epoch=1)}, {"prefetch": worker_pb2.PrefetchAdapter(adapter_uid="..")}],
            "prefetch.adapter_uid",
        ),
    ],
)
async def test_wrong_commands_end_the_stream_and_name_the_field(commands: list[dict[str, Any]], field: str) -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        for command in commands:
            await scheduler.send(**command)

        async def read_all() -> None:
            while True:
                await scheduler.read()

        error = await refused(read_all())
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, field)


async def test_a_scheduler_that_closes_its_side_ends_the_stream_in_order() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
        await scheduler.stream.close_send()
        async with asyncio.timeout(2):
            while await scheduler.stream.read() is not None:
                pass


async def test_a_lost_scheduler_changes_nothing_for_what_runs() -> None:
    async with running_worker() as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        call = asyncio.create_task(collect(worker.execute(message(max_tokens=100))))
        await scheduler.read_until(lambda r: bool(r.started))
        scheduler.stream.cancel()
        assert (await call).finished.outcome == common_pb2.OUTCOME_COMPLETED
        again = Scheduler(worker)
        await again.hello(1)
        assert (await again.read()).generated_tokens == 100


# -- ValidateAdapter


async def test_validation_answers_with_facts_or_problems() -> None:
    problems = {"incoming/bad": [FieldViolation("r", "is 128, the limit is 64"), FieldViolation("bias", "is all")]}
    async with running_worker(validate=FakeValidator(problems)) as worker:
        good = await worker.channel.call(VALIDATE, worker_pb2.ValidateAdapterRequest(path="incoming/good"))
        assert (good.max_lora_rank, list(good.target_modules)) == (8, ["q_proj", "v_proj"])
        bad = await worker.channel.call(VALIDATE, worker_pb2.ValidateAdapterRequest(path="incoming/bad"))
        assert [p.field for p in bad.problems] == ["r", "bias"]
        for path in ("", "x" * 1025):
            error = await refused(worker.channel.call(VALIDATE, worker_pb2.ValidateAdapterRequest(path=path)))
            assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "path")


# -- the app


async def test_registration_and_stop() -> None:
    async with running_worker() as worker:
        assert list(worker.store.keys) == [keys.PEER_SECRET, keys.worker("w")]
        stored = worker.store.get(keys.worker("w"))
        assert stored is not None
        record = json.loads(stored.value)
        assert record["address"] == worker.app.address
        assert (record["vocab_size"], record["eos_token_ids"], record["sequence_slots"]) == (259, [0], 8)
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        stream = worker.execute(message(max_tokens=8000))
        await stream.read()
        stopping = asyncio.create_task(worker.app.stop())
        await scheduler.read_until(lambda r: r.draining)
        result = await collect_finished(stream)
        assert result.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert result.message == "the worker is shutting down"
        await stopping
        assert list(worker.store.keys) == [keys.PEER_SECRET]


async def collect_finished(stream: Stream) -> worker_pb2.ExecuteFinished:
    while (frame := await stream.read()) is not None:
        if frame.WhichOneof("event") == "finished":
            finished: worker_pb2.ExecuteFinished = frame.finished
    return finished


async def test_a_failed_engine_unregisters_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as worker:

        def fail(now: float) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(worker.engine.core, "begin_step", fail)
        result = await collect(worker.execute(message()))
        assert result.finished.outcome == common_pb2.OUTCOME_INTERNAL
        assert await asyncio.wait_for(worker.app.failed(), 2) == "RuntimeError: unforeseen"
        await eventually(lambda: list(worker.store.keys) == [keys.PEER_SECRET])
        assert (await refused(worker.execute(message()).read())).code is Code.UNAVAILABLE


# -- tenants' policies


def _policy(hard_mb: int, weight: int = 3) -> bytes:
    return (
        f"tenant_id: acme\nclasses: {{batch: {{weight: {weight}}}}}\nquotas: {{kv_hbm_mb_hard: {hard_mb}}}\n".encode()
    )


async def test_a_policy_bounds_a_tenants_kv_memory_and_changes_live() -> None:
    async with running_worker() as worker:
        store = worker.store.client()
        longest = message(max_tokens=62)  # 64 tokens are held at most: 4 blocks of 256 KiB, 1 MiB
        await store.put(keys.tenant("acme"), _policy(1))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 4)
        assert worker.engine.core._shares.weight((TenantId("acme"), QosClass.BATCH)) == 3
        assert (await collect(worker.execute(longest))).finished.outcome == common_pb2.OUTCOME_COMPLETED
        longer = message("r2", max_tokens=63)
        error = await refused(worker.execute(longer).read())
        assert (error.code, error.label, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "quota_exceeded", None)
        assert [(b.quota, b.tenant_id, b.limit) for b in error.breaches] == [("quotas.kv_hbm_mb_hard", "acme", 1)]
        await collect(worker.execute(message("r3", tenant_id="beta", max_tokens=63)))

        await store.put(keys.tenant("acme"), b"tenant_id: acme\nquotas: {kv_hbm_mb_hard: none}\n")
        await store.put(keys.tenant("beta"), _policy(1).replace(b"acme", b"beta"))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("beta")) == 4)
        assert (await refused(worker.execute(longer).read())).label == "quota_exceeded", "it stays in force"

        await store.put(keys.tenant("acme"), _policy(2))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 8)
        assert (await collect(worker.execute(longer))).finished.outcome == common_pb2.OUTCOME_COMPLETED
        await store.delete(keys.tenant("acme"))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 4096)


async def test_policies_are_in_force_before_a_worker_is_registered() -> None:
    """The scheduler cannot grant to a worker before it knows the tenants' bounds."""
    engine = make_engine(config())
    shares: list[int] = []
    async with running_worker(engine=engine, policies={"acme": _policy(1)}) as worker:
        await eventually(lambda: any(key.startswith(keys.WORKERS) for key in worker.store.keys))
        shares.append(worker.engine.core._shares.hard(TenantId("acme")))
    assert shares == [4]


# -- traces


@pytest.mark.parametrize("threaded", [False, True])
async def test_swaps_are_counted_and_stand_in_the_spans_of_their_requests(threaded: bool) -> None:
    """Six requests want four blocks each of eight."""
    telemetry = Telemetry.recording("worker")
    settings = config(num_blocks=8, sequence_slots=3, host_kv_mb=16 * 2**18 / 2**20, prefix_cache_share=0.0)
    engine = make_engine(settings, threaded=threaded, step_s=0.0)
    async with running_worker(telemetry=telemetry, settings=settings, engine=engine) as worker:
        calls = [worker.execute(message(f"r{i}", tenant_id="ab"[i % 2], max_tokens=58)) for i in range(6)]
        await asyncio.gather(*(collect(call) for call in calls))
        await eventually(lambda: not worker.engine.runtime.view.running)
        stats = worker.engine.core.stats()
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read()
    assert set(scheduler.setbacks) == {"a", "b"}
    for name in Setbacks._fields:
        assert sum(getattr(each, name) for each in scheduler.setbacks.values()) == getattr(stats, name), name
    assert stats.swaps_out > 0
    assert stats.swaps_in == stats.swaps_out
    metrics = telemetry.recorded_metrics()
    out, back = (frozenset({(Attribute.DIRECTION, direction)}) for direction in ("out", "in"))
    assert metrics[MetricName.KV_SWAPS, out] == metrics[MetricName.KV_SWAPS, back] == stats.swaps_out
    assert metrics[MetricName.KV_SWAPPED_BYTES, out] == stats.blocks_out * MODEL.kv_block_bytes
    assert metrics[MetricName.KV_SWAPPED_BYTES, back] == stats.blocks_in * MODEL.kv_block_bytes
    assert metrics[MetricName.KV_HOST_BYTES, frozenset()] == 0
    assert metrics[MetricName.PREEMPTIONS, frozenset()] == stats.preemptions
    assert metrics.get((MetricName.KV_EVICTIONS, frozenset()), 0) == stats.evictions
    spans = [s["attributes"] for s in telemetry.recorded() if s["name"] == SpanName.EXECUTE]
    assert sum(span[Attribute.KV_SWAPPED] for span in spans) == stats.swaps_out
    assert sum(span[Attribute.KV_EVICTED] for span in spans) == stats.evictions


async def test_the_spans_of_a_request() -> None:
    telemetry = Telemetry.recording("worker")
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with running_worker(telemetry=telemetry, load_s=0.02) as worker:
        metadata = {"traceparent": parent, "x-adapter-id": "upper", "x-tenant-id": "acme"}
        await collect(worker.execute(message(adapter_uid=UID), metadata=metadata))
        await collect(worker.execute(message("base")))
    spans = telemetry.recorded()
    mine = {s["name"]: s for s in spans if s["attributes"][Attribute.REQUEST_ID] == "r1"}
    assert set(mine) == {SpanName.EXECUTE, SpanName.ADAPTER_LOAD, SpanName.PREFILL, SpanName.DECODE}
    for span in mine.values():
        assert span["trace_id"] == "1" * 32
        assert span["attributes"][Attribute.TENANT_ID] == "acme"
        assert span["attributes"][Attribute.QOS_CLASS] == "standard"
        assert span["attributes"][Attribute.ADAPTER_ID] == "upper"
        assert span["attributes"][Attribute.ADAPTER_VERSION] == UID
    assert mine[SpanName.EXECUTE]["parent_id"] == "2" * 16
    assert mine[SpanName.EXECUTE]["attributes"][Attribute.OUTPUT_TOKENS] == 8
    assert mine[SpanName.DECODE]["parent_id"] == mine[SpanName.EXECUTE]["span_id"]
    base = {s["name"] for s in spans if s["attributes"][Attribute.REQUEST_ID] == "base"}
    assert base == {SpanName.EXECUTE, SpanName.PREFILL, SpanName.DECODE}


# -- pins


def _registered(name: str, uid: str, size_bytes: int = 1) -> bytes:
    return AdapterRecord("acme", name, uid, 8, size_bytes, ("q_proj",), 0.0).to_json()


def _pinning(*names: str) -> bytes:
    return f"tenant_id: acme\nadapters: {{pin: [{', '.join(names)}]}}\n".encode()


async def test_pins_are_loaded_at_the_start_and_follow_the_names_and_the_policy() -> None:
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    await store.put(keys.adapter("acme", "one"), _registered("one", UID))
    await store.put(keys.tenant("acme"), _pinning("one", "later"))
    async with running_worker(settings=config(device_adapter_mb=4e-6), store=server) as worker:
        device = worker.engine.backend.on_device
        await eventually(lambda: list(device) == [UID])
        scheduler = Scheduler(worker)
        await scheduler.hello(1)

        async def told(*expected: tuple[str, str, bool, str]) -> None:
            wanted = [
                worker_pb2.PinnedAdapter(name=n, adapter_uid=u, on_device=d, problem=p) for n, u, d, p in expected
            ]
            await scheduler.read_until(lambda r: any(list(t.pins) == wanted for t in r.tenants))

        await told(("one", UID, True, ""), ("later", "", False, "no adapter has this name"))
        await store.put(keys.adapter("acme", "later"), _registered("later", OTHER_UID))
        await told(("one", UID, True, ""), ("later", OTHER_UID, True, ""))
        assert set(device) == {UID, OTHER_UID}
        third = "ef" * 32
        await store.delete(keys.adapter("acme", "one"))
        await store.put(keys.adapter("acme", "one"), _registered("one", third))
        await told(("one", third, True, ""), ("later", OTHER_UID, True, ""))
        await store.put(keys.adapter("acme", "one"), _registered("one", third, size_bytes=3))
        await told(("one", third, False, NO_ROOM_TO_PIN), ("later", OTHER_UID, True, ""))
        await store.put(keys.tenant("acme"), b"tenant_id: acme\n")
        await scheduler.read_until(lambda r: any(not t.pins for t in r.tenants))


async def test_a_pin_that_fails_to_load_is_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenants_module, "PIN_RETRY_S", 0.05)
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    await store.put(keys.adapter("acme", "one"), _registered("one", UID))
    await store.put(keys.tenant("acme"), _pinning("one"))
    broken = [True]
    async with running_worker(
        settings=config(), store=server, error_of=lambda uid, tier: "the file is gone" if broken else None
    ) as worker:
        await eventually(lambda: worker.app._tenants._retry is not None)
        await asyncio.sleep(0.2)
        said = [record for record in caplog.records if record.message == "a pin is not kept"]
        assert len(said) == 1, "once, however often it is tried"
        broken.clear()
        await eventually(lambda: UID in worker.engine.backend.on_device)
