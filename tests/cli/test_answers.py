"""What comes of a request: events gathered into a result, and failures."""

from __future__ import annotations

from manylora.client.answers import (
    ChoiceEnd,
    Collector,
    Degraded,
    Delta,
    Finished,
    RequestFailed,
    Started,
    Timings,
    Usage,
)
from manylora_shared.errors import FieldViolation, InvalidRequest, QuotaBreach, QuotaExceeded, RpcError
from manylora_shared.transport.status import decode_error, encode_details


def test_a_result_is_the_sum_of_its_events() -> None:
    collector = Collector()
    assert collector.is_empty
    collector.add(Started("r", "v", 7, 3))
    collector.add(Delta(1, 0, (5,), "x"))
    collector.add(Delta(0, 0, (1,), "he"))
    collector.add(Delta(0, 1, (2, 3), "llo"))
    ends = (ChoiceEnd(0, "stop", stop_token_id=2), ChoiceEnd(1, "length"))
    collector.add(Finished("completed", ends, Usage(3, 4), Timings(), "w-1"))
    result = collector.result()
    assert (result.text, result.token_ids, result.finish_reason) == ("hello", (1, 2, 3), "stop")
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [("hello", "stop"), ("x", "length")]
    told = result.to_json()
    assert told["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_prompt_tokens": 0,
        "resumed": 0,
    }
    assert len(told["choices"]) == 2
    assert "degraded" not in told


def test_before_the_end_it_is_what_came_so_far() -> None:
    collector = Collector()
    collector.add(Started("r", "v", 7, 3, Degraded(5, 9, 40)))
    collector.add(Delta(0, 0, (1,), "he"))
    result = collector.result()
    assert (result.text, result.outcome, result.finish_reason, result.seed) == ("he", "", "", 7)
    assert result.degraded == Degraded(5, 9, 40)
    assert result.to_json()["degraded"]["asked_max_tokens"] == 9
    assert "choices" not in result.to_json()


def received(error: InvalidRequest | QuotaExceeded) -> RpcError:
    return decode_error(error.code, error.message, encode_details(error))


def test_a_failure_says_all_that_the_server_did() -> None:
    failed = RequestFailed.of(received(InvalidRequest.of_all([FieldViolation("f", "d")])))
    assert (failed.code, failed.reason) == ("INVALID_ARGUMENT", "INVALID")
    assert failed.to_json() == {
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID",
        "message": failed.message,
        "violations": [{"field": "f", "description": "d"}],
    }
    quota = RequestFailed.of(received(QuotaExceeded("m", breaches=[QuotaBreach("q", "t", 3, "d")]))).to_json()
    assert quota["quotas"][0]["limit"] == 3
    assert quota["retry_after_s"] is None, "told where it never helps"
    assert RequestFailed("UNAVAILABLE", "gone").reason == "UNAVAILABLE"
