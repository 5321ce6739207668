"""Whether a sequence's guesses pay, and how many a step has. Pure."""

# Everything is counted in *plain steps*, those without guesses: what a step with guesses took less what it drew is
# lost. A *trial* may lose a little. A flow then owes tokens without guesses for all that it has lost, before the next.

from __future__ import annotations

import enum
import statistics
from collections import deque

MOST_GUESSES = 8  # of one step
MOST_SPECULATING = 8  # sequences in slots: beyond, guesses only add to a batch's work
_ROW = 0.15  # of a plain step, that a guess's row takes where nothing was measured
_MARGIN = 0.03  # by which guesses have to be better
_TRIAL = 3.0  # plain steps that a sequence may lose, what it has gained of late besides
_CREDIT = 16.0  # of what was gained, that may be lost again
_FIRST_PRICE = 64.0  # tokens without guesses for each that was lost; doubled when a trial fails
_LAST_PRICE = 512.0
_SURE = 0.96  # a rate above can hardly be better
_REMEMBERED = 7  # plain steps: the median is what they take
_FIRST_PLAIN = 3  # that are measured before anything is guessed, for the first ones may be slow once
_AGAIN_PLAIN = 4  # as many change the median; they are measured again after so many steps with guesses
_FIRST_TRUSTED = 64
_LONGEST_TRUSTED = 512


class Turn(enum.Enum):
    PLAIN = "plain"
    GUESSING = "guessing"  # it has guesses, or waited for its last draw to have some
    BEHIND = "behind"  # it comes after such a one, whose draw it had to wait for


class GuessTimes:
    """How long plain steps take, by the number of sequences that run."""

    def __init__(self) -> None:
        self.rows = 1  # that run, in the last plan
        self._by_rows = {rows: _Plain() for rows in range(1, MOST_SPECULATING + 1)}

    @property
    def is_known(self) -> bool:
        plain = self._by_rows.get(self.rows)
        return plain is not None and plain.num_wanted <= 0

    def plain(self, seconds: float) -> None:
        """Of a step of all that run; 0: nobody measured."""
        plain = self._by_rows.get(self.rows)
        if plain is not None:
            plain.take(seconds)

    def cost(self, num_guesses: int, seconds: float | None, share: float = 0.0) -> float:
        """In plain steps. seconds: since the sequence's last draw; None: with others' prompts."""
        # share: of the model's time, that a draft model takes for a guess
        plain = self._by_rows.get(self.rows)
        plain_s = 0.0 if plain is None else plain.seconds()
        if not plain_s or seconds is None:
            return 1 + num_guesses * (_ROW + share)
        # More than its rows one by one is some other thing's time.
        return min(seconds / plain_s, 4.0 + num_guesses * (1 + share))


class _Plain:
    __slots__ = ("_left", "_seen", "_trusted", "num_wanted")

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_REMEMBERED)
        self._left = self._trusted = _FIRST_TRUSTED
        self.num_wanted = _FIRST_PLAIN  # steps, before anything is guessed

    def take(self, seconds: float) -> None:
        self._seen.append(seconds)
        self.num_wanted = self.num_wanted - 1 if seconds else 0  # no clock is no reason to wait
        self._left = self._trusted

    def seconds(self) -> float:
        """For a step with guesses, which it counts."""
        self._left -= 1
        if not self._left:
            self._trusted = min(_LONGEST_TRUSTED, 2 * self._trusted)
            self.num_wanted = _AGAIN_PLAIN
        return statistics.median(self._seen) if self._seen else 0.0


class FlowGuesses:
    __slots__ = ("_owed", "_price", "_sure")

    def __init__(self) -> None:
        self._owed = 0.0  # tokens without guesses
        self._price = _FIRST_PRICE
        self._sure = 0.0  # rate of right guesses from which one may try all the same; 0: none

    def may_try(self, rate: float) -> bool:
        return self._owed <= 0 or 0 < self._sure <= rate

    def drew_plain(self, num_tokens: int) -> None:
        self._owed -= num_tokens
        if self._owed <= 0:
            self._owed = self._sure = 0.0

    def lost(self, plain_steps: float) -> None:
        self._owed = max(0.0, self._owed + plain_steps * self._price)

    def failed(self, rate: float) -> None:
        # Much nearer to all right than it was: so a few times at most in one debt.
        best = max(self._sure, rate)
        self._sure = (3 + best) / 4 if best < _SURE else 2.0
        self._price = min(_LAST_PRICE, 2 * self._price)

    def paid(self) -> None:
        self._price = _FIRST_PRICE


class Guessing:
    """Of one sequence."""

    __slots__ = ("_balance", "_floor", "_flow", "_is_trying", "_length", "_times", "_was_guessing", "drawn", "waits")

    def __init__(self, times: GuessTimes, flow: FlowGuesses, first: int) -> None:
        self._times = times
        self._flow = flow
        self._length = first
        self._balance = 0.0
        self._floor = -_TRIAL
        self._is_trying = False
        self._was_guessing = False
        self.waits = False  # the planner holds it back for its last draw
        self.drawn: tuple[int, float] | None = None  # its last step, and when that was over: planning/guesses.py's

    def length(self, rate: float = 0.0) -> int:
        """0: none. rate: of right ones of late, as far as it is known without guessing."""
        allowed = self._times.is_known and (self._is_trying or self._flow.may_try(rate))
        return self._length if allowed else 0

    def begins(self, *, guesses: bool) -> Turn:
        is_guessing = guesses or self.waits
        found = Turn.GUESSING if is_guessing else Turn.BEHIND if self._was_guessing else Turn.PLAIN
        self.waits, self._was_guessing = False, is_guessing
        return found

    def judged(self, num_guesses: int, num_right: int) -> None:
        """Of one step: the next guesses more, or fewer."""
        longest = min(MOST_GUESSES, 2 * num_guesses)
        self._length = max(self._length, longest) if num_right == num_guesses else num_right + 1

    def drew(self, turn: Turn, num_tokens: int, cost: float, rate: float = 0.0, *, catches_up: bool = False) -> None:
        # catches_up: the draft model sees what it missed, for guesses to come
        if turn is Turn.PLAIN:
            self._flow.drew_plain(num_tokens)
            return
        gain = num_tokens - cost * (1 + _MARGIN)
        self._is_trying |= turn is Turn.GUESSING
        owed = min(0.0, self._balance)
        self._balance = min(_CREDIT, self._balance + gain)
        self._flow.lost(owed - min(0.0, self._balance))
        if catches_up:
            self._floor += min(0.0, gain)
        elif self._balance >= _TRIAL:
            self._flow.paid()
            self._floor = -_TRIAL
        if self._balance < self._floor:
            self._flow.failed(rate)
            self._balance, self._floor, self._is_trying = 0.0, -_TRIAL, False
