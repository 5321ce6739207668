"""Matchers over llguidance, whose masks are made on threads beside the engine's.

A tenant's work is one lane, whose masks are made at once, on threads of its own: a grammar that is slow delays its own
tenant's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from manylora_shared.constraints.grammar import panics_as_errors

GRACE_S = 0.001  # that the engine waits for one lane in a step


class Lane:
    """mask_threads: that make the masks of one tenant's rows at once."""

    def __init__(self, pool: ThreadPoolExecutor, notify: Callable[[], None], mask_threads: int) -> None:
        self._pool = pool
        self._notify = notify
        self._mask_threads = mask_threads
        self._executor: LLExecutor | None = None  # from the first time that there are several
        self._lock = threading.Lock()
        self._work: list[ConstraintMatcher] = []
        self._is_idle = threading.Event()
        self._is_idle.set()

    def add(self, matcher: ConstraintMatcher) -> None:
        with self._lock:
            self._work.append(matcher)
            if not self._is_idle.is_set():
                return
            self._is_idle.clear()
        self._pool.submit(self._run)

    def wait(self) -> None:
        self._is_idle.wait(GRACE_S)

    def _run(self) -> None:
        with self._lock:
            work, self._work = self._work, []
        drawing = [matcher for matcher in work if matcher.advance()]
        if drawing:
            self._fill(drawing)
        for matcher in work:
            matcher.end()
        with self._lock:
            has_more = bool(self._work)
            if not has_more:
                self._is_idle.set()
        self._notify()
        if has_more:
            self._pool.submit(self._run)  # behind the lanes that wait for a thread

    def _fill(self, matchers: Sequence[ConstraintMatcher]) -> None:
        words = matchers[0].mask_words
        masks = np.empty((len(matchers), words), np.int32)
        if len(matchers) > 1 and self._executor is None:
            self._executor = LLExecutor(self._mask_threads)
        try:
            with panics_as_errors():
                if self._executor is None:
                    matchers[0].own.unsafe_compute_mask_ptr(masks.ctypes.data, 4 * words)
                else:
                    rows = [(matcher.own, row) for row, matcher in enumerate(matchers)]
                    self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, len(rows))
        except Exception as error:  # whatever it is, it is the end of these choices and of no other
            for matcher in matchers:
                matcher.error = f"{type(error).__name__}: {error}"
            return
        for row, matcher in zip(masks, matchers, strict=True):
            matcher.mask = row.tobytes()


class ConstraintMatcher:
    """See kinds.constraint.Matcher."""

    def __init__(self, compiled: LLMatcher, lane: Lane, vocab_size: int) -> None:
        self._compiled = compiled
        self._lane = lane
        self._own: LLMatcher | None = None
        self._tokens: Sequence[int] = ()
        self._is_done = False
        self.mask_words = -(-vocab_size // 32)
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

    # Called on a lane's thread, which nobody else asks meanwhile:

    @property
    def own(self) -> LLMatcher:
        if self._own is None:
            self._own = self._compiled.deep_copy()
        return self._own

    def advance(self) -> bool:
        """Whether it needs a mask."""
        try:
            with panics_as_errors():
                return self._advance()
        except Exception as error:  # whatever it is, it is this choice's end and no other's
            self.error = f"{type(error).__name__}: {error}"
            return False

    def _advance(self) -> bool:
        own = self.own
        if self._tokens and not own.consume_tokens(list(self._tokens)):
            self.error = own.get_error() or "a token is outside the constraint"
            return False
        self.is_over = own.is_stopped() and own.is_accepting()
        return not self.is_over

    def end(self) -> None:
        if not self.error and not self.is_over and self.own.is_error():
            self.error = self.own.get_error()
        self._is_done = True
