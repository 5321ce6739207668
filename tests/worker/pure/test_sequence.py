"""One choice of a request: its tokens, its life, and what counts of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from manylora_worker.kinds.api import PENDING_TOKEN
from manylora_worker.kinds.guessing import FlowGuesses, Guessing, GuessTimes
from manylora_worker.kinds.sequence import Sequence, SequenceStatus, Swap, SwapStage, sequence_id_of
from manylora_worker.kinds.speculation import MOST_READ, MOST_TOKENS

from tests.worker.pure.rooms import group_of, request_of


def sequence_of(**what: int) -> Sequence:
    return group_of(request_of(**what)).sequences[0]  # type: ignore[arg-type]


def test_tokens_are_prompt_and_output_in_a_row() -> None:
    sequence = sequence_of(prompt=3)
    sequence.output_token_ids += [10, 11]
    every = (0, 1, 2, 10, 11)
    for start, end in itertools.combinations(range(6), 2):
        assert sequence.tokens(start, end) == every[start:end]


def test_a_token_that_was_drawn_and_is_not_known_is_pending() -> None:
    sequence = sequence_of(prompt=3)
    sequence.advance(3, samples=True)
    assert (sequence.num_tokens, sequence.num_uncomputed_tokens, sequence.num_steps_in_flight) == (4, 1, 1)
    assert sequence.next_tokens(1) == (PENDING_TOKEN,)
    sequence.output_token_ids.append(9)
    sequence.num_pending_tokens -= 1
    assert sequence.num_tokens == 4
    assert sequence.next_tokens(1) == (9,)


def test_what_was_charged_does_not_count_again() -> None:
    sequence = sequence_of(prompt=10)
    assert sequence.num_new_tokens(6) == 6
    sequence.num_charged_tokens = 4
    assert sequence.num_new_tokens(6) == 2
    assert sequence.num_new_tokens(3) == 0
    sequence.num_computed_tokens = 8
    assert sequence.num_new_tokens(2) == 2


def test_only_the_first_admission_says_what_was_cached() -> None:
    sequence = sequence_of(prompt=8)
    sequence.start_behind(12)
    assert sequence.group.cached_prompt_tokens == 8, "of the prompt alone"
    sequence.start_behind(4)
    assert (sequence.group.cached_prompt_tokens, sequence.num_computed_tokens) == (8, 4)


def test_to_a_runner_it_is_another_each_time_it_has_lost_its_blocks() -> None:
    sequence = sequence_of()
    ids = []
    for _ in range(3):
        ids.append(sequence.holding_id)
        sequence.num_holdings += 1
    assert len(set(ids)) == 3
    assert {sequence_id_of(i) for i in ids} == {sequence.sequence_id}


def test_a_life_goes_by_its_ways() -> None:
    sequence = sequence_of()
    for status in ("PREFILL", "DECODE", "SWAPPED", "DECODE", "WAITING", "PREFILL", "ENDING", "FINISHED"):
        sequence.move_to(SequenceStatus[status])
    for status in SequenceStatus:
        with pytest.raises(AssertionError, match="is not a legal transition"):
            sequence.move_to(status)


def test_blocks_are_the_copys_while_it_leaves_and_arrives() -> None:
    sequence = sequence_of()
    assert not sequence.is_copying
    for stage, is_copying in ((SwapStage.LEAVING, True), (SwapStage.ON_HOST, False), (SwapStage.ARRIVING, True)):
        sequence.swap = Swap([], SequenceStatus.DECODE, stage)
        assert sequence.is_copying == is_copying


class _Counted(tuple[int, ...]):
    """A prompt that counts how many of its tokens are looked at."""

    num_looked_at = 0

    def __iter__(self) -> Iterator[int]:
        _Counted.num_looked_at += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        _Counted.num_looked_at += len(found) if isinstance(index, slice) else 1
        return found


def test_only_the_end_of_a_long_prompt_is_read_and_only_by_who_may_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = sequence_of(prompt=1)
    monkeypatch.setattr(_Counted, "num_looked_at", 0)
    prompt = _Counted(range(100_000))
    sequence.group.request = replace(sequence.group.request, prompt_token_ids=prompt)
    sequence.group.speculates = True
    sequence.output_token_ids.append(7)
    sequence.max_output_tokens = 100
    times, flow = GuessTimes(), FlowGuesses()
    sequence.guessing = Guessing(times, flow, 4)
    flow.lost(1.0)
    for _ in range(3):
        assert sequence.guess(4) == (), "no plain step was measured"
        times.plain(1.0)
    for _ in range(64):
        assert sequence.guess(4) == (), "the flow owes for what it has lost"
        flow.drew_plain(1)
    assert sequence.speculation is None
    assert sequence.guess(0) == ()
    assert (sequence.speculation, _Counted.num_looked_at) == (None, 0)
    for _ in range(2 * MOST_TOKENS // MOST_READ):
        assert sequence.guess(4) == (), "nothing repeats itself"
    assert sequence.speculation is not None
    assert 0 < _Counted.num_looked_at <= MOST_TOKENS


def test_a_flow_in_debt_finds_out_whether_it_would_be_right() -> None:
    sequence = sequence_of(prompt=16)
    sequence.group.speculates = True
    sequence.max_output_tokens = 100
    times, flow = GuessTimes(), FlowGuesses()
    for _ in range(3):
        times.plain(1.0)
    flow.lost(3.0)
    flow.failed(0.5)  # so that a much higher rate may try again
    sequence.guessing = Guessing(times, flow, 4)
    for token_id in range(16):
        assert sequence.guess(4) == ()
        sequence.output_token_ids.append(token_id)
        if sequence.speculation is not None:
            sequence.speculation.tell(token_id)
    assert sequence.speculation is not None


def test_the_first_choice_that_is_not_finished_leads() -> None:
    group = group_of(request_of(n=3))
    first, second, third = group.sequences
    first.move_to(SequenceStatus.FINISHED)
    assert (group.leader, group.num_unfinished) == (second, 2)
    second.move_to(SequenceStatus.FINISHED)
    third.move_to(SequenceStatus.FINISHED)
    assert (group.leader, group.num_unfinished) == (None, 0)
