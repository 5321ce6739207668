"""Log-probabilities in both shapes; through the endpoints: test_http_chat.py and test_http_completions.py."""

from __future__ import annotations

from manylora.v1 import common_pb2
from manylora_router.front.http.api.answers import Choice, Opened
from manylora_router.front.http.api.asked import Form
from manylora_router.front.http.api.logprobs import Logprobs
from manylora_sim.fake_text import FakeText
from router_fakes import ids_of

FOUND = common_pb2.PositionLogprobs(
    logprob=-1.0, top=[common_pb2.TokenLogprob(token_id=ids_of(each)[0], logprob=-0.5) for each in "xyz"]
)
PIECE = Choice("a", ids_of("a"), [FOUND], offset=7)


def test_no_more_are_told_than_asked_for() -> None:
    told = Logprobs(FakeText(), Form("m", has_logprobs=True, top_logprobs=2))
    assert [top["token"] for top in told.of_chat(PIECE)["content"][0]["top_logprobs"]] == ["x", "y"]
    assert told.of_completion(PIECE, Opened()) == {
        "tokens": ["a"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"a": -1.0, "x": -0.5, "y": -0.5}],
        "text_offset": [7],
    }


def test_an_echoed_prompts_first_token_has_nothing_before_it() -> None:
    told = Logprobs(FakeText(), Form("m", has_logprobs=True, top_logprobs=1))
    echoed = told.of_completion(Choice("a", ids_of("a"), [FOUND], offset=2), Opened(ids_of("hi"), [FOUND]))
    assert echoed == {
        "tokens": ["h", "i", "a"],
        "token_logprobs": [None, -1.0, -1.0],
        "top_logprobs": [None, {"i": -1.0, "x": -0.5}, {"a": -1.0, "x": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_a_prompts_are_vllms() -> None:
    told = Logprobs(FakeText(), Form("m", prompt_logprobs=2))
    found = common_pb2.PositionLogprobs(logprob=-1.0, rank=3, top=FOUND.top)
    i, x, y = (str(ids_of(each)[0]) for each in "ixy")
    assert told.of_prompt(Opened(ids_of("hi"), [found])) == [
        None,
        {
            i: {"logprob": -1.0, "rank": 3, "decoded_token": "i"},
            x: {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
            y: {"logprob": -0.5, "rank": 2, "decoded_token": "y"},
        },
    ]


def test_tokens_by_their_ids() -> None:
    told = Logprobs(FakeText(), Form("m", has_logprobs=True, are_tokens_ids=True))
    assert told.of_chat(PIECE)["content"][0]["token"] == f"token_id:{ids_of('a')[0]}"
