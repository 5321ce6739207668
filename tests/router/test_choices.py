"""Choices by themselves: what a worker's tokens become, and when each choice has its end."""

from __future__ import annotations

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_router.request.choices import Choices
from manylora_router.text.stop_strings import StopStrings
from manylora_shared.errors import InternalError
from manylora_sim.fake_text import FakeDetokenizer
from router_fakes import tokens

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP


def choices(n: int = 1, stop: list[str] | None = None) -> Choices:
    return Choices([FakeDetokenizer() for _ in range(n)], StopStrings(stop) if stop else None)


def chunk(text: str, first: int, *, choice: int = 0, finish: common_pb2.FinishReason = 0) -> worker_pb2.TokenChunk:  # type: ignore[assignment]
    return tokens(1, first, list(text.encode()), choice=choice, finish=finish).tokens


def test_tokens_become_deltas_at_their_positions() -> None:
    each = choices(2)
    first = each.take(chunk("ab", 0)).deltas[0].delta
    other = each.take(chunk("x", 0, choice=1)).deltas[0].delta
    second = each.take(chunk("c", 2, finish=LENGTH)).deltas[0].delta
    assert first is not None
    assert other is not None
    assert second is not None
    assert (first.text, first.first_position, second.text, second.first_position) == ("ab", 0, "c", 2)
    assert (other.choice, each.num_tokens, each.have_ended) == (1, 4, False)
    assert each.take(chunk("", 1, choice=1, finish=STOP)).deltas == []
    assert each.have_ended
    assert not each.are_cut_short
    assert [end.finish_reason for end in each.ends()] == [LENGTH, STOP]


def test_a_stop_string_ends_a_choice_that_the_worker_goes_on_with() -> None:
    each = choices(stop=["."])
    taken = each.take(chunk("a.b", 0))
    assert [frame.delta.text for frame in taken.deltas if frame.delta] == ["a"]
    assert (taken.stopped, each.num_tokens, each.are_cut_short) == ([0], 2, True)
    assert each.take(chunk("c", 3)).deltas == []
    assert (each.ends()[0].finish_reason, each.ends()[0].stop_string) == (STOP, ".")


def test_a_stop_string_that_is_a_token_is_told_as_the_string() -> None:
    for token_id, told in ((7, ("<end>", None)), (8, (None, 8))):
        each = Choices([FakeDetokenizer()], StopStrings(["<end>"]), stop_tokens={7: "<end>"})
        each.take(tokens(1, 0, list(b"ab"), finish=STOP, stop_token_id=token_id).tokens)
        (end,) = each.ends()
        assert (end.finish_reason, (end.stop_string, end.stop_token_id)) == (STOP, told)
        assert not each.are_cut_short


@pytest.mark.parametrize("wrong", [chunk("a", 1), chunk("a", 0, choice=1)])
def test_lost_output_is_a_bug(wrong: worker_pb2.TokenChunk) -> None:
    with pytest.raises(InternalError):
        choices().take(wrong)


def test_what_was_held_back_is_told_at_an_early_end() -> None:
    each = choices(stop=["bc"])
    each.take(chunk("ab", 0))
    (rest,) = each.rest()
    assert rest.delta is not None
    assert (rest.delta.text, rest.delta.first_position, list(rest.delta.token_ids)) == ("b", 2, [])
    assert each.ends()[0].finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


def test_what_a_caller_has_of_a_choice_that_has_ended_is_whole() -> None:
    """Its last text, half a character, was held back until its end: it is missing for nobody who joins later."""
    euro = list("a\u20ac".encode())[:-1]
    each = choices()
    (head,) = each.go_on([(euro, 2)], 100)
    assert head.text == "a\ufffd"
    last = each.take(tokens(1, len(euro), [], finish=STOP).tokens)
    assert last.deltas == []
    assert each.have_ended
    lacks = choices()
    (head,) = lacks.go_on([(euro, 1)], 100)
    assert head.text == "a"
    (last_delta,) = lacks.take(tokens(1, len(euro), [], finish=STOP).tokens).deltas
    assert last_delta.delta is not None
    assert last_delta.delta.text == "\ufffd"
