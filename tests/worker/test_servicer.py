"""WorkerService as routers call it, over the in-memory transport: Execute, StopChoice, ValidateAdapter."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code, FieldViolation
from manylora_shared.ids import AdapterUid
from manylora_shared.transport.base import methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import FakeValidator, reference_tokens
from manylora_sim.network import MemoryNetwork
from manylora_worker.hosting import view as engine_view
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS
from manylora_worker.kinds.api import AdapterTier

from tests.worker.worker_fakes import (
    END_REQUEST,
    OTHER_UID,
    STOP_CHOICE,
    UID,
    VALIDATE,
    Worker,
    collect,
    collect_rest,
    config,
    eventually,
    message,
    refused,
    running_worker,
)

PROMPT = (5, 6, 7)


async def test_a_request_over_grpc_on_the_engines_thread() -> None:
    async with running_worker(transport=GrpcTransport(), threaded=True) as worker:
        result = await collect(worker.execute(message(adapter_uid=UID, max_tokens=30)))
        assert result.tokens == {0: reference_tokens(PROMPT, UID, 3, 0, 30)}
        assert result.finish == {0: common_pb2.FINISH_REASON_LENGTH}
        assert result.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert result.finished.decode_ms > 0
        assert result.finished.prefill_ms > 0


DROP_CACHES = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["DropCaches"]


async def test_dropped_caches_are_filled_again_and_what_runs_goes_on() -> None:
    async with running_worker(transport=GrpcTransport(), threaded=True) as worker:
        prompt = list(range(5, 55))
        running = worker.execute(message("long", prompt_token_ids=prompt, adapter_uid=OTHER_UID, max_tokens=3000))
        await running.read()
        first = await collect(worker.execute(message("r1", prompt_token_ids=prompt, adapter_uid=UID, max_tokens=30)))
        for adapters, prefixes, cached in ((False, False, 48), (True, False, 48), (True, True, 0)):
            request = worker_pb2.DropCachesRequest(adapters=adapters, prefixes=prefixes)
            dropped = await worker.channel.call(DROP_CACHES, request)
            assert dropped.adapters == int(adapters), "the one that runs stays"
            assert (dropped.prefix_blocks > 0) == prefixes
            again = await collect(
                worker.execute(message("r2", prompt_token_ids=prompt, adapter_uid=UID, max_tokens=30))
            )
            assert again.tokens == first.tokens
            assert again.finished.cached_prompt_tokens == cached
        running.cancel()


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
        stream = worker.execute(message(emitted=[{"token_ids": whole[:5]}]))
        await stream.read()
        frame = await stream.read()
        assert frame.tokens.choices[0].first_position == 5
        tokens = list(frame.tokens.choices[0].token_ids)
        while (frame := await stream.read()) is not None:
            for choice in frame.tokens.choices:
                tokens += choice.token_ids
        assert tokens == whole[5:]


async def test_each_choice_goes_on_where_it_stood() -> None:
    async with running_worker() as worker:
        whole = [reference_tokens(PROMPT, None, 3, choice, 8) for choice in range(4)]
        emitted = [{"token_ids": whole[0][:5]}, {"has_ended": True}, {}, {"token_ids": whole[3][:1]}]
        result = await collect(worker.execute(message(n=4, emitted=emitted)), {0: 5, 3: 1})
        assert result.tokens == {0: whole[0][5:], 2: whole[2], 3: whole[3][1:]}
        assert result.finished.output_tokens == 3 + 8 + 7
        (counted,) = worker.engine.core.flows().values()
        assert counted == (0, 18), "what is computed again is charged to nobody"


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
    ({"emitted": [{"token_ids": [1]}], "n": 2}, "emitted"),
    ({"emitted": [{"token_ids": [1] * 8}]}, "emitted"),
    ({"emitted": [{"token_ids": [259]}]}, "emitted"),
    ({"emitted": [{"has_ended": True}]}, "emitted"),
    ({"bad_sequences": [{"token_ids": [1]}, {}]}, "bad_sequences"),
    ({"bad_sequences": [{"token_ids": [259]}]}, "bad_sequences"),
    ({"bad_sequences": [{"token_ids": [1] * 1025}]}, "bad_sequences"),
    ({"bad_sequences": [{"token_ids": [i]} for i in range(259)]}, "bad_sequences"),
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
    ({"logit_bias": {259: 1.0}}, "logit_bias[259]"),
    ({"logit_bias": {1: 101.0}}, "logit_bias[1]"),
    ({"logit_bias": {1: math.nan}}, "logit_bias[1]"),
    ({"bad_words": ["word"]}, "bad_words"),
]


async def test_min_tokens_and_bad_sequences_reach_the_engine() -> None:
    def wanted(**more: Any) -> list[int]:
        return reference_tokens(PROMPT, None, 9, 0, 900, eos_token_id=0, stop_token_ids=[0], **more)

    plain = wanted()
    assert 5 < len(plain) < 500, "the test wants a stop"
    bad = ((plain[2],), tuple(plain[3:5]))
    want = wanted(min_tokens=500, bad_sequences=bad)
    sampling = common_pb2.SamplingParams(seed=9, min_tokens=500)
    async with running_worker(eos_token_id=0) as worker:
        asked = message(max_tokens=900, stop_token_ids=[0], sampling=sampling, adapter_uid="")
        asked.bad_sequences.extend(worker_pb2.TokenSequence(token_ids=ids) for ids in bad)
        result = await collect(worker.execute(asked))
    assert result.tokens == {0: want}
    assert len(want) >= 500


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


async def test_a_request_whose_stream_was_given_up_says_what_it_cost() -> None:
    async with running_worker() as worker:
        stream = worker.execute(message(prompt_token_ids=[5] * 100, max_tokens=8000))
        await stream.read()
        await stream.read()
        stream.cancel()
        request = worker_pb2.EndRequestRequest(request_id="r1")
        finished = (await worker.channel.call(END_REQUEST, request)).finished
        assert finished.prompt_tokens == 100
        assert worker.engine.core.stats().generated_tokens <= finished.output_tokens < 8000
        assert (await worker.channel.call(END_REQUEST, request)).finished == finished, "asked again"


async def test_the_end_of_a_request_that_never_comes_is_not_waited_for_long() -> None:
    async with running_worker() as worker:
        call = worker.channel.call(END_REQUEST, worker_pb2.EndRequestRequest(request_id="r9"))
        assert (await refused(call)).code is Code.NOT_FOUND
        assert not worker.engine.runtime.view._asked


async def test_a_request_may_come_after_its_end_was_asked_for() -> None:
    async with running_worker() as worker:
        asked = asyncio.create_task(
            worker.channel.call(END_REQUEST, worker_pb2.EndRequestRequest(request_id="r1")), name="asked"
        )
        await asyncio.sleep(0.05)
        stream = worker.execute(message(max_tokens=8))
        assert (await collect(stream)).finished.prompt_tokens == len(PROMPT)
        assert (await asked).finished.output_tokens == 8


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


@pytest.mark.parametrize(
    ("frames_per_s", "more_than", "less_than"),
    [
        pytest.param(1000, 4, 6, id="one in 32 to 43 ms"),
        pytest.param(4000, 10, 14, id="one in 8 to 11 ms"),
    ],
)
def test_frames_are_fewer_than_tokens_when_streams_are_many(frames_per_s: int, more_than: int, less_than: int) -> None:
    """Of 100 ms, the first token's and the last ones among them; flushes have their own grid of times, so the mean of
    several beginnings."""
    frames = [sum(frames_of_32_streams(frames_per_s, begin_s=0.001 * i)) for i in range(8)]
    assert 32 * more_than < sum(frames) / len(frames) < 32 * less_than


def test_the_slowest_streams_have_a_frame_of_the_first_token_and_one_of_the_last() -> None:
    """Of 100 ms, at one frame in 150 ms."""
    assert frames_of_32_streams(frames_per_s=100) == [2] * 32


def frames_of_32_streams(frames_per_s: int, *, begin_s: float = 0.0) -> list[int]:
    """Frames with tokens of each of 32 streams that begin together, of 100 tokens in steps of a millisecond.

    Args:
        begin_s: so long after the worker has started.
    """

    async def main() -> list[int]:
        settings = config(sequence_slots=32, max_frames_per_s=frames_per_s)
        async with running_worker(settings=settings, step_s=0.001) as worker:
            await asyncio.sleep(begin_s)
            results = await asyncio.gather(
                *(
                    collect(worker.execute(message(f"r{i}", max_tokens=100, prompt_token_ids=[i + 1])))
                    for i in range(32)
                )
            )
            for i, result in enumerate(results):
                assert result.tokens[0] == reference_tokens([i + 1], None, 3, 0, 100)
            return [result.token_frames for result in results]

    return simulation.run(main(), seed=1).result


async def test_where_a_requests_adapter_was_is_told_as_it_begins() -> None:
    async def found(uid: str) -> int:
        stream = worker.execute(message(f"r{len(seen)}", adapter_uid=uid, max_tokens=2))
        first = await stream.read()
        await collect_rest(stream)
        return int(first.started.adapter)

    async with running_worker(load_s=0.01) as worker:
        seen: list[int] = []
        for uid in (UID, UID, ""):
            seen.append(await found(uid))
    nowhere = worker_pb2.ADAPTER_TIER_UNSPECIFIED
    assert seen == [nowhere, worker_pb2.ADAPTER_TIER_DEVICE, nowhere]


def test_that_a_request_has_begun_is_told_with_its_first_token_or_before_long() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), min_delay_s=0.0, max_delay_s=0.0)
        async with running_worker(step_s=0.005, transport=network.transport("worker")) as worker:
            soon, late = worker.execute(message("soon")), worker.execute(message("late", prompt_token_ids=[1] * 4000))
            now = asyncio.get_running_loop().time
            began = now()
            assert (await soon.read()).HasField("started")
            told = now()
            assert (await soon.read()).HasField("tokens")
            assert now() - told < 0.001, "they leave together"
            assert (await late.read()).HasField("started")
            assert 0.02 <= now() - began < 0.03, "its prompt takes more steps than that"

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


def _asked(path: str, **changes: str) -> worker_pb2.ValidateAdapterRequest:
    return worker_pb2.ValidateAdapterRequest(**({"path": path, "tenant_id": "acme", "adapter_uid": UID} | changes))


async def test_validation_answers_with_facts_or_problems() -> None:
    problems = {"incoming/bad": [FieldViolation("r", "is 128, the limit is 64"), FieldViolation("bias", "is all")]}
    async with running_worker(validate=FakeValidator(problems)) as worker:
        good = await worker.channel.call(VALIDATE, _asked("incoming/good"))
        assert (good.max_lora_rank, list(good.target_modules)) == (8, ["q_proj", "v_proj"])
        assert worker.engine.core.stats().generated_tokens == 1, "it was tried"
        bad = await worker.channel.call(VALIDATE, _asked("incoming/bad"))
        assert [p.field for p in bad.problems] == ["r", "bias"]
        assert worker.engine.core.stats().generated_tokens == 1, "it was not"
        for request, field in (
            (_asked(""), "path"),
            (_asked("x" * 1025), "path"),
            (_asked("x", tenant_id="A B"), "tenant_id"),
            (_asked("x", adapter_uid="12"), "adapter_uid"),
        ):
            error = await refused(worker.channel.call(VALIDATE, request))
            assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, field)


async def test_an_adapter_that_fails_its_first_step_is_told_of_as_a_problem() -> None:
    async with running_worker(error_of=lambda uid, tier: "its digest is wrong") as worker:
        answer = await worker.channel.call(VALIDATE, _asked("incoming/good"))
        assert [(p.field, p.description) for p in answer.problems] == [
            ("adapter_model.safetensors", "its digest is wrong")
        ]


async def test_a_worker_that_drains_tries_no_adapter() -> None:
    async with running_worker() as worker:
        worker.app._servicer.drain()
        error = await refused(worker.channel.call(VALIDATE, _asked("incoming/good")))
        assert error.code is Code.UNAVAILABLE
