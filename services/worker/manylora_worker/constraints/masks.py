"""Matchers over llguidance, whose masks are made on threads beside the engine's.

A tenant's work is one lane, which few threads at a time work off: a grammar that is slow delays its own tenant's rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher
from manylora_shared.constraints.grammar import panics_as_errors

GRACE_S = 0.001  # that the engine waits for one lane in a step
_THREADS = 2  # that work for one lane at a time
_TURN = 8  # masks that a thread makes before other lanes have their turn


class Lane:
    def __init__(self, pool: ThreadPoolExecutor, notify: Callable[[], None]) -> None:
        self._pool = pool
        self._notify = notify
        self._lock = threading.Lock()
        self._work: deque[ConstraintMatcher] = deque()
        self._num_turns = 0  # that run or wait for a thread
        self._is_idle = threading.Event()
        self._is_idle.set()

    def add(self, matcher: ConstraintMatcher) -> None:
        with self._lock:
            self._work.append(matcher)
            self._is_idle.clear()
            if self._num_turns == _THREADS:
                return
            self._num_turns += 1
        self._pool.submit(self._run)

    def wait(self) -> None:
        self._is_idle.wait(GRACE_S)

    def _run(self) -> None:
        for _ in range(_TURN):
            with self._lock:
                matcher = self._work.popleft() if self._work else None
            if matcher is None:
                break
            matcher.work()
        with self._lock:
            has_more = bool(self._work)
            self._num_turns -= not has_more
            if not self._num_turns:
                self._is_idle.set()
        self._notify()
        if has_more:
            self._pool.submit(self._run)  # behind the lanes that wait for a thread


class ConstraintMatcher:
    """See kinds.constraint.Matcher."""

    def __init__(self, compiled: LLMatcher, lane: Lane, vocab_size: int) -> None:
        self._compiled = compiled
        self._lane = lane
        self._own: LLMatcher | None = None
        self._tokens: Sequence[int] = ()
        self._is_done = False
        self._mask_bytes = -(-vocab_size // 32) * 4
        self.is_over = False
        self.error = ""
        self.mask = b""

    def take(self, token_ids: Sequence[int]) -> None:
        self._tokens, self._is_done = token_ids, False
        self._lane.add(self)

    def is_done(self, *, waits: bool) -> bool:
        if waits and not self._is_done:
            self._lane.wait()
        return self._is_done

    def work(self) -> None:
        """On a lane's thread, which nobody else asks meanwhile."""
        try:
            with panics_as_errors():
                self._work()
        except Exception as error:  # whatever it is, it is this choice's end and no other's
            self.error = f"{type(error).__name__}: {error}"
        self._is_done = True

    def _work(self) -> None:
        if self._own is None:
            self._own = self._compiled.deep_copy()
        own = self._own
        if self._tokens and not own.consume_tokens(list(self._tokens)):
            self.error = own.get_error() or "a token is outside the constraint"
            return
        if own.is_stopped() and own.is_accepting():
            self.is_over = True
            return
        self.mask = own.compute_bitmask()[: self._mask_bytes]  # it has a word more where 32 divides the vocabulary
        if own.is_error():
            self.error = own.get_error()
