"""Answers that outlive their caller's connection, their router, or one call: whole, the same, and charged once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from manylora.v1 import common_pb2, inference_pb2, worker_pb2
from manylora_router.front import kept_answers
from manylora_router.front.generation import generate
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AnswerRecord, RouterRecord
from manylora_shared.errors import Code
from router_fakes import (
    Answer,
    RouterCluster,
    finished,
    ids_of,
    plain_request,
    read_all,
    say,
    simulate,
    text_request,
    tokens,
    until,
)

TEXT = "".join(chr(97 + i % 26) for i in range(120))
Request = inference_pb2.GenerateRequest
SLOW = say(TEXT, per_frame=2, pause_s=0.01)


def resumable(**fields: object) -> inference_pb2.GenerateRequest:
    return text_request(max_tokens=100, resumable=True, **fields)


async def some_frames(cluster: RouterCluster, request: Request, count: int) -> Answer:
    """Of an answer whose caller goes away then."""
    stream, answer = cluster.open(request), Answer()
    for _ in range(count):
        answer.frames.append(await stream.read())
    stream.cancel()
    return answer


def behind(request: Request, answer: Answer, *, has_tokens: bool) -> Request:
    """The request again, of a caller that has this much of its answer."""
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.resume.token = answer.frames[0].started.resume_token
    again.resume.next_frame = len(answer.frames)
    if has_tokens:
        for choice in range(request.n or 1):
            again.resume.emitted.add(token_ids=answer.ids_of(choice), text_characters=len(answer.text_of(choice)))
    return again


def whole(head: Answer, tail: Answer) -> Answer:
    """`tail` without its Started, behind `head`."""
    frames = list(tail.frames)
    first = inference_pb2.GenerateResponse()
    first.CopyFrom(frames[0])
    first.ClearField("started")
    is_empty = not (first.HasField("delta") or first.HasField("finished"))
    return Answer([*head.frames, *(frames[1:] if is_empty else [first, *frames[1:]])], tail.error)


@pytest.mark.parametrize("got", [1, 2, 7, 30])
def test_another_router_goes_on_with_what_its_caller_has(got: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        request = resumable()
        head = await some_frames(cluster, request, got)
        await cluster.at_rest()
        begun = dict(cluster.scheduler.settled)
        tail = await cluster.ask(behind(request, head, has_tokens=True))
        await cluster.at_rest()
        assert [f.frame for f in tail.frames] == list(range(len(tail.frames)))
        answer = whole(head, tail)
        assert answer.text == TEXT[:100]
        assert answer.ids_of() == ids_of(TEXT[:100])
        assert tail.frames[0].started.seed == head.frames[0].started.seed
        usage = tail.frames[-1].finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.resumed) == (2, 100, 1)
        (charged,) = (tokens for request_id, tokens in cluster.scheduler.settled if request_id not in begun)
        assert charged == 100 - len(head.ids_of()), "prompt and tokens were charged before"
        assert cluster.scheduler.enqueued[-1].resumed
        assert list(cluster.workers[1].executed[-1].emitted[0].token_ids if head.ids_of() else []) == head.ids_of()

    simulate(test, script=SLOW)


def test_text_that_is_held_back_comes_once_and_ends_are_found_again() -> None:
    """The stop string's beginning is in the tokens that the caller has, and not in its text."""

    async def test(cluster: RouterCluster) -> None:
        request = resumable(stop=["fgh"])
        stream = cluster.open(request)
        head = Answer([await stream.read() for _ in range(4)])
        stream.cancel()
        assert head.ids_of() == ids_of(TEXT[:6]), "f is here"
        assert head.text == TEXT[:5], "and held back"
        tail = await cluster.ask(behind(request, head, has_tokens=True))
        assert whole(head, tail).text == TEXT[:5]
        assert tail.frames[-1].finished.choices[0].stop_string == "fgh"
        nothing_left = await cluster.ask(behind(request, whole(head, tail), has_tokens=True))
        assert nothing_left.error is None
        assert nothing_left.text == ""
        assert nothing_left.frames[-1].finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert nothing_left.frames[-1].finished.choices[0].stop_string == "fgh"

    simulate(test, script=SLOW)


def test_choices_that_have_ended_stay_ended() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = resumable(n=2)
        request.max_tokens = 4
        head = Answer(
            [
                inference_pb2.GenerateResponse(
                    frame=0,
                    started=(await some_frames(cluster, request, 1)).frames[0].started,
                    delta=inference_pb2.Delta(choice=0, token_ids=ids_of("abcd"), text="abcd"),
                )
            ]
        )
        await cluster.at_rest()
        tail = await cluster.ask(behind(request, head, has_tokens=True))
        executed = cluster.workers[-1].executed or cluster.workers[0].executed
        assert [each.has_ended for each in executed[-1].emitted] == [True, False]
        assert tail.text_of(0) == ""
        assert tail.text_of(1) == "wxyz"
        reasons = [end.finish_reason for end in tail.frames[-1].finished.choices]
        assert reasons == [common_pb2.FINISH_REASON_LENGTH] * 2

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield worker_pb2.ExecuteResponse(frame=0, started=worker_pb2.ExecuteStarted())
        if not request.emitted:
            await asyncio.sleep(60)
        yield tokens(1, 0, ids_of("wxyz"), choice=1, finish=common_pb2.FINISH_REASON_LENGTH)
        yield finished(2)

    simulate(test, script=script)


def test_what_does_not_fit_is_refused() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = resumable()
        head = await some_frames(cluster, request, 3)
        await cluster.at_rest()
        again = behind(request, head, has_tokens=True)
        again.text = "ho"
        assert (await cluster.ask(again)).error.code is Code.INVALID_ARGUMENT  # type: ignore[union-attr]
        again = behind(request, head, has_tokens=False)
        assert (await cluster.ask(again)).error.code is Code.NOT_FOUND  # type: ignore[union-attr]
        again = behind(request, head, has_tokens=True)
        assert (await cluster.ask(again, x_tenant_id="other")).error.code is Code.INVALID_ARGUMENT  # type: ignore[union-attr]
        await cluster.put_tenant("acme", "quotas: {resumes_per_s: 1}\n")
        await until(lambda: cluster.app.directory.policy_of("acme").quotas.resumes_per_s == 1)  # type: ignore[arg-type, union-attr]
        answers = [await cluster.ask(again) for _ in range(2)]
        assert answers[0].error is None
        assert "quotas.resumes_per_s" in answers[1].error.message  # type: ignore[union-attr]
        assert answers[1].error.retry_after_s is not None  # type: ignore[union-attr]

    simulate(test, script=SLOW)


def test_a_kept_answer_waits_for_its_caller() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = resumable(keep_s=5)
        head = await some_frames(cluster, request, 3)
        await asyncio.sleep(3.0)
        assert len(cluster.workers[0].executed) == 1
        tail = await cluster.ask(behind(request, head, has_tokens=False))
        answer = Answer([*head.frames, *tail.frames], tail.error)
        assert answer.text == TEXT[:100]
        assert answer.finished.usage.resumed == 0
        assert sum(len(w.executed) for w in cluster.workers) == 1
        assert len(cluster.scheduler.settled) == 1
        await asyncio.sleep(6.0)
        again = await cluster.ask(behind(request, head, has_tokens=False))
        assert again.error.code is Code.NOT_FOUND  # type: ignore[union-attr]

    simulate(test, script=SLOW)


def test_without_its_caller_a_kept_answer_ends_after_its_time_and_another_one_at_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        worker = cluster.workers[0]
        await some_frames(cluster, resumable(keep_s=1), 3)
        await asyncio.sleep(0.9)
        assert worker.running == 1
        await until(lambda: not worker.running, within_s=0.2)
        await some_frames(cluster, resumable(), 3)
        await until(lambda: not any(w.running for w in cluster.workers), within_s=0.1)
        refused = await cluster.ask(resumable(keep_s=61))
        assert refused.error.violations[0].field == "keep_s"  # type: ignore[union-attr]

    simulate(test, script=say(TEXT, per_frame=1, pause_s=0.1))


def test_a_key_does_the_work_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = text_request(max_tokens=100)
        first, second = await asyncio.gather(
            *(cluster.ask(request, idempotency_key="k") for _ in range(2)),
        )
        third = await cluster.ask(request, idempotency_key="k")
        assert first.finished == second.finished == third.finished
        assert first.text == second.text == third.text == TEXT[:100]
        assert first.frames[0].started.request_id == third.frames[0].started.request_id
        await cluster.at_rest()
        assert sum(len(w.executed) for w in cluster.workers) == 1
        assert len(cluster.scheduler.settled) == 1
        reused = await cluster.ask(text_request("another"), idempotency_key="k")
        assert (reused.error.code, reused.error.label) == (Code.INVALID_ARGUMENT, "idempotency_key_reused")  # type: ignore[union-attr]
        other = await cluster.ask(request, idempotency_key="k", x_tenant_id="other")
        assert other.frames[0].started.request_id != first.frames[0].started.request_id
        await asyncio.sleep(kept_answers.REPLAY_S)
        await cluster.ask(request, idempotency_key="k")
        assert sum(len(w.executed) for w in cluster.workers) == 3
        assert len((await cluster.store.list(keys.ANSWERS)).kvs) == 1, "the old ones' records went"

    simulate(test, script=SLOW)


def test_what_failed_is_done_again() -> None:
    async def test(cluster: RouterCluster) -> None:
        failing = True

        async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            yield worker_pb2.ExecuteResponse(frame=0, started=worker_pb2.ExecuteStarted())
            if failing:
                yield finished(1, common_pb2.OUTCOME_INTERNAL, "broken")
            else:
                yield tokens(1, 0, ids_of("ok"), finish=common_pb2.FINISH_REASON_STOP)
                yield finished(2)

        for worker in cluster.workers:
            worker.script = script
        failed = await cluster.ask(text_request(), idempotency_key="k")
        assert failed.error.code is Code.INTERNAL  # type: ignore[union-attr]
        failing = False
        again = await cluster.ask(text_request(), idempotency_key="k")
        assert (again.error, again.text) == (None, "ok")

    simulate(test)


def test_what_a_router_that_is_gone_had_begun_is_not_done_again() -> None:
    async def test(cluster: RouterCluster) -> None:
        record = AnswerRecord("acme", kept_answers.digest_of_key("0 k"), "router-1", 5.0, "f" * 32, has_begun=True)
        await cluster.store.put(record.key, record.to_json())
        refused = await cluster.ask(text_request(), idempotency_key="k")
        assert refused.error is not None
        assert (refused.error.code, refused.error.label) == (Code.ABORTED, "answer_lost")
        assert "router-1" in refused.error.message
        assert sum(len(w.executed) for w in cluster.workers) == 0
        assert len(cluster.app.kept) == 0
        await cluster.store.put(record.key, replace(record, has_begun=False).to_json())
        assert (await cluster.ask(text_request(), idempotency_key="k")).error is None, "only claimed"
        cluster.store_server.set_up(False)
        refused = await cluster.ask(text_request(), idempotency_key="k2")
        assert refused.error is not None
        assert refused.error.code is Code.UNAVAILABLE
        cluster.store_server.set_up(True)

    simulate(test)


def test_work_whose_key_another_router_took_meanwhile_ends_before_its_first_frame() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        asked = asyncio.create_task(cluster.ask(text_request(), idempotency_key="k"))
        await until(lambda: bool(cluster.scheduler.queued))
        (claimed,) = (await cluster.store.list(keys.ANSWERS)).kvs
        taken = replace(AnswerRecord.stored(claimed), router_id="router-1")
        await cluster.store.put(taken.key, taken.to_json())
        for request_id in list(cluster.scheduler.queued):
            cluster.scheduler.grant(request_id)
        answer = await asked
        assert answer.frames == []
        assert answer.error is not None
        assert (answer.error.code, answer.error.label) == (Code.ABORTED, "answered_elsewhere")
        assert [AnswerRecord.stored(kv) for kv in (await cluster.store.list(keys.ANSWERS)).kvs] == [taken]
        await cluster.at_rest()

    simulate(test)


def test_past_its_tenants_bound_an_answer_is_its_readers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "TENANT_BYTES", 4_000)

    async def test(cluster: RouterCluster) -> None:
        request = resumable(keep_s=5)
        answer = await cluster.ask(request)
        assert answer.text == TEXT[:100]
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        again = await cluster.ask(behind(request, Answer(answer.frames[:2]), has_tokens=False))
        assert again.error.code is Code.NOT_FOUND  # type: ignore[union-attr]
        head = await some_frames(cluster, request, 20)
        await until(lambda: not any(w.running for w in cluster.workers), within_s=0.5)
        assert len(head.frames) == 20
        await asyncio.sleep(6.0)
        assert len(cluster.app.kept) == 0
        assert cluster.app.kept._bytes == {}

    simulate(test, script=SLOW)


def test_a_key_whose_answer_is_past_its_bound_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "TENANT_BYTES", 4_000)

    async def test(cluster: RouterCluster) -> None:
        request = text_request(max_tokens=100)
        first = asyncio.create_task(cluster.ask(request, idempotency_key="k"))
        await asyncio.sleep(0.3)
        refused = [await cluster.ask(request, idempotency_key="k")]
        assert (await first).text == TEXT[:100]
        refused.append(await cluster.ask(request, idempotency_key="k"))
        await asyncio.sleep(kept_answers.KEY_KEEP_S + 1.0)
        refused.append(await cluster.ask(request, idempotency_key="k"))
        for each in refused:
            assert each.error is not None
            assert (each.error.code, each.error.label) == (Code.ABORTED, "answer_lost")
            assert "another key" in each.error.message
        assert sum(len(w.executed) for w in cluster.workers) == 1

    simulate(test, script=SLOW)


def test_bytes_add_up_while_an_answer_past_its_bound_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "TENANT_BYTES", 4_000)

    async def test(cluster: RouterCluster) -> None:
        app = cluster.app
        request = await plain_request(cluster, keep_s=1, max_tokens=100)
        frames = generate(request, intake=app.intake, calls=app.calls, outliving=app.outliving)
        text = ""
        async for frame in frames:
            text += frame.delta.text if frame.delta is not None else ""
            if frame.number % 8 == 0:  # another one comes while this one waits
                await cluster.ask(text_request(max_tokens=2, keep_s=1))
                await asyncio.sleep(0.1)
        assert text == TEXT[:100]
        assert app.kept._bytes.get("acme", 0) == sum(each.size_bytes for each in app.kept.all())
        await asyncio.sleep(3.0)
        assert (len(app.kept), app.kept._bytes) == (0, {})

    simulate(test, script=SLOW)


@pytest.mark.parametrize("asker_has_most", [False, True])
def test_past_the_bound_of_all_who_has_most_makes_room(monkeypatch: pytest.MonkeyPatch, asker_has_most: bool) -> None:
    async def test(cluster: RouterCluster) -> None:
        kept, request = cluster.app.kept, text_request(max_tokens=100)
        ended = {"t1": 2, "t2": 4, "t3": 1, "acme": 6 * asker_has_most}
        for tenant, count in ended.items():
            await cluster.put_tenant(tenant)
            await asyncio.sleep(0.1)
            for i in range(count):
                assert (await cluster.ask(request, x_tenant_id=tenant, idempotency_key=f"k{i}")).error is None
        monkeypatch.setattr(kept_answers, "ALL_BYTES", sum(kept._bytes.values()) + 1_000)
        await some_frames(cluster, resumable(keep_s=30), 5)
        await asyncio.sleep(2.0)
        (running,) = (each for each in kept.all() if not each.key)
        assert (running.has_ended, running.error, running.num_tokens) == (True, None, 100), "its caller may come back"
        left = {tenant: [each.key for each in kept.all() if each.tenant == tenant and each.key] for tenant in ended}
        gave = {tenant for tenant, count in ended.items() if len(left[tenant]) < count}
        assert gave == ({"acme"} if asker_has_most else {"t2"})
        assert left["t2"][-1] == "0 k3", "the oldest goes first"

    simulate(test, script=SLOW)


def test_a_tenant_keeps_so_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "TENANT_ANSWERS", 2)

    async def test(cluster: RouterCluster) -> None:
        async def ask(key: str, tenant: str = "acme") -> Answer:
            return await cluster.ask(text_request(), idempotency_key=key, x_tenant_id=tenant)

        assert [(await ask(key)).error for key in "abc"] == [None] * 3, "ended ones make room"
        answers = await asyncio.gather(*(ask(key) for key in "defg"), ask("d", "other"))
        labels = [answer.error.label if answer.error else "" for answer in answers]
        assert sorted(labels) == ["", "", "", "overloaded", "overloaded"]
        assert labels[-1] == "", "another tenant's are no matter"
        executed = sum(len(w.executed) for w in cluster.workers)
        again = await ask("a")
        assert again.error is not None
        assert (again.error.code, again.error.label) == (Code.ABORTED, "answer_lost"), "it is not done again"
        reused = await cluster.ask(text_request("another"), idempotency_key="a")
        assert (reused.error.label if reused.error else "") == "idempotency_key_reused"
        assert sum(len(w.executed) for w in cluster.workers) == executed
        await asyncio.sleep(kept_answers.REPLAY_S)
        assert (await ask("a")).error is None
        assert len((await cluster.store.list(keys.ANSWERS)).kvs) == 1

    simulate(test)


def test_a_router_that_stops_hands_over_and_refuses() -> None:
    async def test(cluster: RouterCluster) -> None:
        record = RouterRecord("router-1", "router-1:1")
        await cluster.store.put(record.key, record.to_json())
        plain = asyncio.create_task(cluster.ask(text_request(max_tokens=100)))
        request = resumable()
        streams = [asyncio.create_task(cluster.ask(request)) for _ in range(3)]
        kept = asyncio.create_task(cluster.ask(resumable(keep_s=5)))
        await asyncio.sleep(0.2)
        stopping = asyncio.create_task(cluster.app.stop(30.0))
        heads = [await stream for stream in [*streams, kept]]
        assert not plain.done()
        for head in heads:
            assert head.error is not None
            assert (head.error.code, head.error.label) == (Code.UNAVAILABLE, "draining")
            assert head.text == TEXT[: len(head.text)] != ""
        refused = await cluster.ask(text_request())
        assert refused.error is not None
        assert refused.error.label == "draining"
        assert (await plain).text == TEXT[:100]
        await stopping
        settled = dict(cluster.scheduler.settled)
        for head in heads:
            assert settled[head.frames[0].started.request_id] == 2 + len(head.ids_of()), "what its caller has"
        assert cluster.app.calls.counters.handed_over == 4
        assert cluster.app.calls.counters.failed == 0

    simulate(test, script=SLOW)


def test_a_router_that_is_the_last_one_lets_answers_end() -> None:
    async def test(cluster: RouterCluster) -> None:
        short = asyncio.create_task(cluster.ask(text_request(max_tokens=10, resumable=True)))
        long = asyncio.create_task(cluster.ask(resumable()))
        await asyncio.sleep(0.03)
        await cluster.app.stop(0.2)
        assert (await short).text == TEXT[:10]
        cut = await long
        assert cut.error is not None
        assert cut.error.label == "draining", "at the bound its caller can go on, too"
        assert cut.text == TEXT[: len(cut.text)]

    simulate(test, script=SLOW)


def test_who_reads_a_kept_answer_at_the_end_is_told_that_the_router_stops() -> None:
    async def test(cluster: RouterCluster) -> None:
        reading = asyncio.create_task(cluster.ask(text_request(max_tokens=100), idempotency_key="k"))
        await asyncio.sleep(0.1)
        await cluster.app.stop(0.1)
        cut = await reading
        assert cut.error is not None
        assert (cut.error.code, cut.error.label) == (Code.UNAVAILABLE, "draining")
        assert (await cluster.store.list(keys.ANSWERS)).kvs == ()

    simulate(test, script=SLOW)


def test_an_answer_that_is_read_slowly_is_its_tenants_until_it_is_read() -> None:
    async def test(cluster: RouterCluster) -> None:
        app = cluster.app
        request = await plain_request(cluster, keep_s=1, max_tokens=100)
        frames = generate(request, intake=app.intake, calls=app.calls, outliving=app.outliving)
        await anext(frames)
        await asyncio.sleep(10.0)
        assert len(cluster.app.kept) == 1
        text = "".join([frame.delta.text async for frame in frames if frame.delta is not None])
        assert text == TEXT[:100]
        await asyncio.sleep(3.0)
        assert len(cluster.app.kept) == 0

    simulate(test, script=SLOW)


@pytest.mark.parametrize("may_stream", [False, True])
def test_of_a_hedge_nothing_is_charged_while_its_frames_are_held_back(may_stream: bool) -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.word = worker_pb2.ExecuteFinished(prompt_tokens=2, output_tokens=40)
        if not may_stream:
            await cluster.put_tenant("acme", "security: {can_stream: false}\n")
            await until(lambda: not cluster.app.directory.policy_of("acme").security.can_stream)  # type: ignore[arg-type, union-attr]
        for hedge, charged in ({"x_hedge": "1"}, 42 * may_stream), ({}, 42):
            stream = cluster.open(text_request(max_tokens=100), **hedge)
            reading = asyncio.create_task(read_all(stream))
            await asyncio.sleep(0.2)
            stream.cancel()
            assert bool((await reading).frames) == may_stream
            await cluster.at_rest()
            assert cluster.scheduler.settled[-1][1] == charged

    simulate(test, script=SLOW)


def test_of_a_hedge_that_is_cancelled_before_its_first_frame_nothing_is_charged() -> None:
    async def test(cluster: RouterCluster) -> None:
        for hedge, charged in ({"x_hedge": "1"}, 0), ({}, 2):
            stream = cluster.open(text_request(), **hedge)
            reading = asyncio.create_task(read_all(stream))
            await until(lambda: sum(w.running for w in cluster.workers) == 1)
            stream.cancel()
            await reading
            await cluster.at_rest()
            assert cluster.scheduler.settled[-1][1] == charged

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        await asyncio.sleep(60)
        yield finished(0)

    def with_word() -> worker_pb2.ExecuteFinished:
        return worker_pb2.ExecuteFinished(prompt_tokens=2)

    async def told(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.word = with_word()
        await test(cluster)

    simulate(told, script=script)
