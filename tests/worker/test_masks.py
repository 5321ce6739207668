"""Matchers: tokens in, masks out, beside the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import grammar_of
from manylora_worker.constraints.masks import ConstraintMatcher, Lane

EOS = 0


class ByteWords:
    """Token 1 + byte is that byte."""

    eos_token_id, bos_token_id, unk_token_id = EOS, None, None
    tokens = (b"<end>", *(bytes([byte]) for byte in range(256)))
    special_token_ids = (EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return [1 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


@pytest.fixture
def lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(1) as pool:
        yield Lane(pool, threading.Event().set)


def matcher(lane: Lane, regex: str) -> ConstraintMatcher:
    tokenizer = LLTokenizer(TokenizerWrapper(ByteWords()), eos_token=[EOS])
    return ConstraintMatcher(
        LLMatcher(tokenizer, grammar_of(Constraint(ConstraintKind.REGEX, regex))), lane, tokenizer.vocab_size
    )


def done(each: ConstraintMatcher) -> ConstraintMatcher:
    while not each.is_done(waits=True):
        pass
    return each


def allowed(each: ConstraintMatcher) -> bytes:
    """Of bytes, "." for the end."""
    bits = np.unpackbits(np.frombuffer(done(each).mask, np.uint8), bitorder="little")
    return bytes(sorted(token - 1 if token else ord(".") for token in np.flatnonzero(bits).tolist()))


def test_masks_follow_the_tokens(lane: Lane) -> None:
    own = matcher(lane, "ab?")
    own.take(())
    assert allowed(own) == b"a"
    own.take([1 + ord("a")])
    assert allowed(own) == b".b"
    own.take([1 + ord("b")])
    assert done(own).is_over
    again = matcher(lane, "ab?")  # another worker's, with what was told already
    again.take([1 + ord("a")])
    assert allowed(again) == b".b"


def test_a_token_outside_is_an_error_of_its_own(lane: Lane) -> None:
    own, other = matcher(lane, "ab?"), matcher(lane, "x")
    own.take([1 + ord("z")])
    other.take(())
    assert done(own).error
    assert allowed(other) == b"x"
    assert not other.error


def test_masks_of_one_pass_are_each_their_own(lane: Lane) -> None:
    started, ends = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        ends.wait()

    lane._pool.submit(hold)
    assert started.wait(10)
    owns = [matcher(lane, regex) for regex in ("a", "b|c", "d", "a?")]
    for own, token in zip(owns, (None, None, "z", "a"), strict=True):
        own.take([] if token is None else [1 + ord(token)])
    ends.set()
    assert [allowed(own) for own in owns[:2]] == [b"a", b"bc"]
    assert done(owns[2]).error
    assert done(owns[3]).is_over


class Busy(ConstraintMatcher):
    """Has new work as often as it is worked at, until `other` is done."""

    def __init__(self, lane: Lane, other: ConstraintMatcher) -> None:
        self.is_over, self.error, self.turns = True, "", 0
        self.begins = threading.Event()
        self._busy_lane, self._other = lane, other

    def work(self) -> None:
        self.begins.wait()
        self.turns += 1
        if self.turns < 1000 and not self._other.is_done(waits=False):
            self._busy_lane.add(self)


def test_a_lane_that_never_rests_lets_others_have_turns() -> None:
    told = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = matcher(Lane(pool, told.set), "x")
        lane = Lane(pool, told.set)
        busy = Busy(lane, other)
        lane.add(busy)
        other.take(())
        busy.begins.set()
        assert allowed(other) == b"x"
    assert 1 <= busy.turns < 10
