"""The gRPC front: every field of its messages is read and told, and nothing is decided."""

from __future__ import annotations

import pytest
from manylora.v1 import common_pb2, inference_pb2
from manylora_router.front.grpc import message_of, read_request
from manylora_router.guard.admission import MAX_CHAT_MESSAGES, ChatPrompt, TextPrompt, TokenPrompt
from manylora_router.request.frames import ChoiceEnd, Degraded, Delta, Finished, Frame, Started
from manylora_shared.errors import InvalidRequest
from manylora_shared.sampling import Sampling

METADATA = {
    "authorization": "Bearer k",
    "x-tenant-id": "acme",
    "x-request-class": "batch",
    "x-adapter-id": "upper",
    "x-priority": "3",
    "idempotency-key": "again",
    "traceparent": "00-1-2-01",
}


def test_every_field_is_read() -> None:
    message = inference_pb2.GenerateRequest(
        text="hi",
        max_tokens=7,
        sampling=common_pb2.SamplingParams(temperature=0.5, logit_bias={3: 1.0}),
        stop=["."],
        stop_token_ids=[9],
        ignore_eos=True,
        n=2,
    )
    read = read_request(message, METADATA, 1.5)
    assert (read.prompt, read.max_tokens, read.n, read.ignore_eos) == (TextPrompt("hi"), 7, 2, True)
    assert read.sampling == Sampling(temperature=0.5, logit_bias={3: 1.0})
    assert (list(read.stop), list(read.stop_token_ids)) == (["."], [9])
    assert (read.authorization, read.tenant, read.adapter) == ("Bearer k", "acme", "upper")
    assert (read.request_class, read.priority, read.idempotency_key) == ("batch", "3", "again")
    assert (read.traceparent, read.time_remaining_s) == ("00-1-2-01", 1.5)


def test_what_is_absent_is_empty() -> None:
    read = read_request(inference_pb2.GenerateRequest(), {}, None)
    assert (read.prompt, read.tenant, read.adapter, read.authorization) == (None, "", "", "")
    assert (read.traceparent, read.time_remaining_s, read.sampling) == (None, None, Sampling())


def test_prompts() -> None:
    ids = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]))
    prompt = read_request(ids, {}, None).prompt
    assert isinstance(prompt, TokenPrompt)
    assert list(prompt.ids) == [1, 2]
    said = [inference_pb2.ChatMessage(role="user", content="hi")]
    chat = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=said))
    assert read_request(chat, {}, None).prompt == ChatPrompt([("user", "hi")])


def test_what_a_chat_asks_of_its_template() -> None:
    chat = inference_pb2.ChatPrompt(continue_final_message=True, add_generation_prompt=False)
    given = {"think": False, "n": 3, "part": 0.5, "none": None, "of": {"words": ["a", ["b"]]}}
    chat.chat_template_kwargs.update(given)
    prompt = read_request(inference_pb2.GenerateRequest(chat=chat), {}, None).prompt
    assert prompt == ChatPrompt([], True, False, given)
    assert isinstance(prompt, ChatPrompt)
    assert isinstance(prompt.template_kwargs["n"], int)
    chat.chat_template_kwargs.update({"long": "x" * 20_000})
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs: has 2\d+ bytes; at most"):
        read_request(inference_pb2.GenerateRequest(chat=chat), {}, None)


def test_of_too_long_a_chat_no_more_is_copied_than_says_so() -> None:
    said = [inference_pb2.ChatMessage(role="user")] * (2 * MAX_CHAT_MESSAGES)
    chat = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=said))
    prompt = read_request(chat, {}, None).prompt
    assert isinstance(prompt, ChatPrompt)
    assert len(prompt.messages) == MAX_CHAT_MESSAGES + 1


def test_every_field_is_told() -> None:
    degraded = Degraded(max_tokens=5, asked_max_tokens=9, overload_level=40)
    logprobs = [common_pb2.PositionLogprobs(logprob=-0.5)]
    usage, timings = common_pb2.Usage(prompt_tokens=2), common_pb2.Timings(queue_ms=1.5)
    ends = [ChoiceEnd(0, common_pb2.FINISH_REASON_STOP, stop_string="."), ChoiceEnd(1, stop_token_id=0)]
    frame = Frame(
        4,
        Started("r", "up@2", "a" * 64, 2**63, [5, 6], degraded, resume_token="t"),
        logprobs,
        Delta(1, 3, [8], "x", logprobs),
        Finished(common_pb2.OUTCOME_COMPLETED, ends, usage, timings, "w", degraded),
    )
    told = inference_pb2.Degraded(max_tokens=5, asked_max_tokens=9, overload_level=40)
    message = message_of(frame)
    assert message == inference_pb2.GenerateResponse(
        frame=4,
        started=inference_pb2.Started(
            request_id="r",
            adapter="up@2",
            adapter_version="a" * 64,
            seed=2**63,
            prompt_tokens=2,
            degraded=told,
            resume_token="t",
        ),
        prompt_logprobs=logprobs,
        delta=inference_pb2.Delta(choice=1, first_position=3, token_ids=[8], text="x", logprobs=logprobs),
        finished=inference_pb2.Finished(
            outcome=common_pb2.OUTCOME_COMPLETED,
            choices=[
                inference_pb2.ChoiceEnd(choice=0, finish_reason=common_pb2.FINISH_REASON_STOP, stop_string="."),
                inference_pb2.ChoiceEnd(choice=1, stop_token_id=0),
            ],
            usage=usage,
            timings=timings,
            worker_id="w",
            degraded=told,
        ),
    )
    for part in (message, message.started, message.delta, message.finished):
        assert {f.name for f, _ in part.ListFields()} >= {f.name for f in part.DESCRIPTOR.fields}


@pytest.mark.parametrize("part", ["started", "delta", "finished"])
def test_what_a_frame_has_not_is_not_told(part: str) -> None:
    frame = {
        "started": Frame(started=Started("", "", "", 0, (), None)),
        "delta": Frame(delta=Delta(0, 0, (), "")),
        "finished": Frame(
            finished=Finished(common_pb2.OUTCOME_UNSPECIFIED, (), common_pb2.Usage(), common_pb2.Timings(), "", None)
        ),
    }[part]
    message = message_of(frame)
    assert [name for name in ("started", "delta", "finished") if message.HasField(name)] == [part]  # type: ignore[arg-type]
    assert not message.started.HasField("degraded")
