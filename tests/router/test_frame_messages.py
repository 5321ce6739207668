"""A frame that another router tells of is the one that was told."""

from __future__ import annotations

import pytest
from manylora.v1 import common_pb2
from manylora_router.front.frame_messages import frame_of, message_of
from manylora_router.request.frames import ChoiceEnd, Degraded, Delta, Finished, Frame, Started

DEGRADED = Degraded(5, 9, 3, "small", "default", not_streamed=True)
SCORED = [common_pb2.PositionLogprobs(rank=3, logprob=-0.5)]
ENDS = [
    ChoiceEnd(0, common_pb2.FINISH_REASON_STOP, stop_string=""),
    ChoiceEnd(1, common_pb2.FINISH_REASON_STOP, stop_token_id=0),
    ChoiceEnd(2, common_pb2.FINISH_REASON_LENGTH),
]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(7),
        Frame(0, started=Started("a" * 32, "upper@2", "d" * 64, 2**63, [1, 2, 3], DEGRADED, resume_token="t")),
        Frame(1, started=Started("a", "", "", 0, [], None), delta=Delta(1, 4, [5, 6], "é", SCORED)),
        Frame(2, prompt_logprobs=SCORED),
        Frame(
            3,
            finished=Finished(
                common_pb2.OUTCOME_COMPLETED,
                ENDS,
                common_pb2.Usage(prompt_tokens=3),
                common_pb2.Timings(total_ms=1.5),
                "worker-1",
                DEGRADED,
            ),
        ),
    ],
)
def test_there_and_back(frame: Frame) -> None:
    message = message_of(frame)
    prompt = frame.started.prompt_token_ids if frame.started is not None else []
    again = frame_of(message, prompt)
    assert message_of(again) == message
    assert (again.number, again.started, list(again.prompt_logprobs)) == (
        frame.number,
        frame.started,
        list(frame.prompt_logprobs),
    )
    assert again.finished == frame.finished
    if frame.delta is not None:
        assert again.delta is not None
        assert again.delta.text == frame.delta.text
