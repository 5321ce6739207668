"""The protos' messages as the client's own data."""

from __future__ import annotations

from manylora.client.answers import ChoiceEnd, Delta, Finished, PositionLogprobs, Started
from manylora.client.messages import events_from, status_from
from manylora.v1 import admin_pb2, common_pb2, inference_pb2


def test_a_frame_is_its_events_in_order() -> None:
    message = inference_pb2.GenerateResponse()
    message.started.request_id, message.started.seed = "r", 7
    message.delta.text = "a"
    message.delta.token_ids.extend([1, 2])
    message.delta.logprobs.add(logprob=-0.5).top.add(token_id=1, logprob=-0.25)
    message.finished.outcome = common_pb2.OUTCOME_COMPLETED
    message.finished.choices.add(finish_reason=common_pb2.FINISH_REASON_STOP, stop_string="x")
    started, delta, finished = events_from(message)
    assert isinstance(started, Started)
    assert (started.request_id, started.seed, started.degraded) == ("r", 7, None)
    assert delta == Delta(0, 0, (1, 2), "a", (PositionLogprobs(-0.5, ((1, -0.25),)),))
    assert isinstance(finished, Finished)
    assert finished.outcome == "completed"
    assert finished.choices == (ChoiceEnd(0, "stop", stop_string="x"),)


def test_a_frame_that_this_client_does_not_know_is_nothing() -> None:
    assert events_from(inference_pb2.GenerateResponse()) == []


def test_numbers_of_a_newer_server_stay_readable_and_unset_ones_are_empty() -> None:
    message = inference_pb2.GenerateResponse()
    message.finished.outcome = 77  # type: ignore[assignment]
    message.finished.choices.add()
    (finished,) = events_from(message)
    assert isinstance(finished, Finished)
    assert (finished.outcome, finished.choices[0].finish_reason) == ("77", "")
    assert (finished.choices[0].stop_string, finished.choices[0].stop_token_id) == (None, None)


def test_what_was_not_measured_is_none_and_zero_is_zero() -> None:
    message = admin_pb2.GetStatusResponse()
    message.slos.add(tenant_id="a", ttft_p95_ms=0.0)
    message.scheduler.overload.classes.add(qos_class=common_pb2.QOS_CLASS_BATCH, late_part=0.0)
    status = status_from(message)
    assert (status.slos[0].ttft_p95_ms, status.slos[0].ttft_p50_ms) == (0.0, None)
    (counts,) = status.scheduler.overload.classes
    assert (counts.qos_class, counts.late_part, counts.target_ms) == ("batch", 0.0, None)
