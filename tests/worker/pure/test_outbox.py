"""What the engine has to tell, in order and once."""

from __future__ import annotations

import itertools

import pytest
from manylora_worker.engine.outbox import Outbox, RequestEnd
from manylora_worker.kinds.api import FinishReason, Logprobs, Sampled

from tests.worker.pure.rooms import group_of, request_of


def test_tokens_and_ends_come_in_order_and_are_taken_once() -> None:
    outbox = Outbox()
    (sequence,) = group_of(request_of()).sequences
    outbox.token(sequence, Sampled(1, 40, Logprobs(-0.5)), 0, is_last=False)
    outbox.token(sequence, Sampled(1, 41), 1, is_last=True)
    first, last = outbox.take_outputs()
    assert (first.first_position, first.token_ids, first.finish_reason) == (0, (40,), None)
    assert first.logprobs == (Logprobs(-0.5),)
    assert (last.token_ids, last.finish_reason, last.logprobs) == ((41,), FinishReason.LENGTH, ())
    assert outbox.take_outputs() == []


def test_a_choice_that_ends_without_a_token_says_where_it_stood() -> None:
    outbox = Outbox()
    (sequence,) = group_of(request_of(emitted=(7, 8))).sequences
    outbox.choice_ended(sequence, FinishReason.STOP, stop_token_id=2)
    (output,) = outbox.take_outputs()
    assert (output.first_position, output.token_ids, output.stop_token_id) == (2, (), 2)


@pytest.mark.parametrize("reason", FinishReason)
def test_a_request_was_completed_unless_its_last_choice_was_cut_short(reason: FinishReason) -> None:
    end = RequestEnd.of(group_of(request_of()), reason, "why", 5.0)
    is_completed = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert end.reason is (FinishReason.STOP if is_completed else reason)
    assert (end.message, end.cached_prompt_tokens) == ("why", 0)


@pytest.mark.parametrize("reasons", [*itertools.product((FinishReason.STOP, FinishReason.LENGTH), repeat=2)])
def test_one_choice_that_was_too_long_makes_the_request_so(reasons: tuple[FinishReason, ...]) -> None:
    group = group_of(request_of(n=2))
    for sequence, reason in zip(group.sequences, reasons, strict=True):
        sequence.finish_reason = reason
    end = RequestEnd.of(group, reasons[-1], "", 5.0)
    assert (end.reason, end.by_length) == (FinishReason.STOP, FinishReason.LENGTH in reasons)


def test_phases_end_where_the_next_began_or_with_the_request() -> None:
    group = group_of(request_of())
    group.times.added_s = 1.0
    end = RequestEnd.of(group, FinishReason.ABORTED, "", 10.0)
    assert (end.adapter_wait_s, end.prefill_s, end.decode_s) == (9.0, 0.0, 0.0)
    group.times.adapter_ready_s = 2.0
    group.times.first_step_s = 4.0
    assert (end.adapter_wait_s, end.prefill_s, end.decode_s) == (1.0, 6.0, 0.0)
    group.times.first_token_s = 7.0
    assert (end.prefill_s, end.decode_s) == (3.0, 3.0)
