"""What a client has of an answer, and how it asks another router for the rest."""

from __future__ import annotations

import pytest
from manylora.client.caller import is_untaken
from manylora.client.streams.progress import Progress, is_lost
from manylora.v1 import inference_pb2
from manylora_shared.errors import Code, RpcError


def test_the_request_that_goes_on_says_what_was_heard() -> None:
    progress = Progress(inference_pb2.GenerateRequest(text="hi", n=2, max_tokens=9))
    assert not progress.can_go_on
    started = inference_pb2.Started(request_id="a", resume_token="t")
    progress.take(inference_pb2.GenerateResponse(frame=0, started=started))
    for frame, choice, text in ((1, 0, "né"), (2, 1, "x"), (3, 0, "w")):
        delta = inference_pb2.Delta(choice=choice, token_ids=range(frame), text=text)
        progress.take(inference_pb2.GenerateResponse(frame=frame, delta=delta))
    assert progress.can_go_on
    asked = progress.request()
    assert (asked.text, asked.n, asked.max_tokens) == ("hi", 2, 9)
    assert (asked.resume.token, asked.resume.next_frame) == ("t", 4)
    had = [(list(each.token_ids), each.text_characters) for each in asked.resume.emitted]
    assert had == [([0, 0, 1, 2], 3), ([0, 1], 1)]


@pytest.mark.parametrize(
    ("label", "lost", "untaken"),
    [
        ("unavailable", True, False),
        ("unreachable", True, True),
        ("draining", True, True),
        ("worker_lost", False, False),
        ("circuit_open", False, False),
    ],
)
def test_which_failures_are_a_routers(label: str, lost: bool, untaken: bool) -> None:
    error = RpcError(Code.UNAVAILABLE, "")
    error.label = label
    assert (is_lost(error), is_untaken(error)) == (lost, untaken)
    other = RpcError(Code.INTERNAL, "")
    other.label = label
    assert not is_lost(other)
    assert not is_untaken(other)
