"""Messages of worker.proto into the engine's dataclasses and back."""

from __future__ import annotations

from typing import Any

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import RequestId
from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.kinds.api import FinishReason, Logprobs, TokenOutput
from manylora_worker.models.parts import ModelInfo
from manylora_worker.serving.wire import MAX_CHOICES, engine_request, execute_finished, tokens_frame

MODEL = ModelInfo("m", "d", "cpu", vocab_size=100, max_context_tokens=50, eos_token_ids=(2,), kv_block_bytes=1)


def execute(**fields: Any) -> worker_pb2.ExecuteRequest:
    good = {
        "request_id": "r",
        "tenant_id": "acme",
        "qos_class": common_pb2.QOS_CLASS_BATCH,
        "prompt_token_ids": [1, 99],
        "max_tokens": 5,
        "n": 1,
        "sampling": common_pb2.SamplingParams(seed=3),
    }
    return worker_pb2.ExecuteRequest(**(good | fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "a b"),
        ("tenant_id", "A"),
        ("qos_class", common_pb2.QOS_CLASS_UNSPECIFIED),
        ("adapter_uid", "ab"),
        ("adapter_uid", "ab" * 32 + "@"),
        ("adapter_uid", "ab" * 32 + "@../x"),
        ("adapter_uid", "ab" * 32 + "@another"),
        ("prompt_token_ids", []),
        ("prompt_token_ids", [100]),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("max_tokens", 0),
        ("max_tokens", 51),
        ("emitted", [{"token_ids": [1] * 5}]),
        ("emitted", [{"token_ids": [100]}]),
        ("emitted", [{"has_ended": True}]),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [1] * 257),
    ],
)
def test_every_field_is_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        engine_request(execute(**{field: value}), MODEL)
    assert [violation.field for violation in error.value.violations] == [field]


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as error:
        engine_request(worker_pb2.ExecuteRequest(), MODEL)
    fields = [violation.field for violation in error.value.violations]
    assert fields == ["request_id", "tenant_id", "qos_class", "prompt_token_ids", "n", "max_tokens", "sampling.seed"]


def test_each_choice_of_a_resumed_request_is_told_where_it_stood() -> None:
    emitted = [{"token_ids": [7]}, {"has_ended": True}, {}]
    assert engine_request(execute(emitted=emitted, n=3), MODEL).emitted == ((7,), None, ())
    with pytest.raises(InvalidRequest, match="one a choice"):
        engine_request(execute(emitted=[{"token_ids": [7]}], n=2), MODEL)
    scored = common_pb2.SamplingParams(seed=1, prompt_logprobs=2)
    with pytest.raises(InvalidRequest, match="before the first token"):
        engine_request(execute(emitted=emitted, n=3, sampling=scored), MODEL)


def output(choice: int, position: int, *tokens: int, **more: Any) -> TokenOutput:
    return TokenOutput(RequestId("r"), choice, position, tokens, **more)


def test_a_frame_has_an_entry_a_choice_with_all_its_tokens() -> None:
    frame = tokens_frame(
        3,
        [
            output(1, 4, 10, logprobs=(Logprobs(-1.0, ((10, -1.0),)),)),
            output(0, 0, 20),
            output(1, 5, 11, finish_reason=FinishReason.STOP, stop_token_id=2),
        ],
    )
    assert frame is not None
    first, second = frame.tokens.choices
    assert (frame.frame, first.choice, first.first_position, list(first.token_ids)) == (3, 1, 4, [10, 11])
    assert (first.finish_reason, first.stop_token_id) == (common_pb2.FINISH_REASON_STOP, 2)
    assert first.logprobs[0].top[0].token_id == 10
    assert (second.choice, list(second.token_ids)) == (0, [20])
    assert not second.HasField("stop_token_id")


def test_an_end_that_the_requests_outcome_tells_is_no_frame() -> None:
    assert tokens_frame(1, [output(0, 3, finish_reason=FinishReason.ABORTED)]) is None
    frame = tokens_frame(1, [output(0, 3, 8, finish_reason=FinishReason.ERROR)])
    assert frame is not None
    assert frame.tokens.choices[0].finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


def test_outcomes() -> None:
    assert execute_finished(StreamEnd(EndKind.SLOW_READER, "m"), 1).outcome == common_pb2.OUTCOME_SLOW_READER
    aborted = execute_finished(StreamEnd(EndKind.ABORTED, "whatever"), 1)
    assert (aborted.outcome, aborted.message) == (common_pb2.OUTCOME_WORKER_LOST, "the worker is shutting down")


def test_a_prompts_log_probabilities_are_the_requests() -> None:
    scored = [Logprobs(-1.0, ((5, -0.5),), 2), Logprobs(-2.0, (), 1)]
    frame = tokens_frame(3, [TokenOutput(RequestId("r"), 0, 0, (), prompt_logprobs=scored)])
    assert frame is not None
    assert not frame.tokens.choices
    told = [(each.logprob, [top.token_id for top in each.top], each.rank) for each in frame.tokens.prompt_logprobs]
    assert told == [(-1.0, [5], 2), (-2.0, [], 1)]
