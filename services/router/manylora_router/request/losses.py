"""What befell the workers of one request, and how long its caller waited for others to go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.errors import WorkerLost

MAX_LOSSES = 4  # of workers that ran it
MAX_FRUITLESS = 5  # workers in a row that gave it up before they drew a token


@dataclass
class Losses:
    why: str = ""
    pauses_s: list[float] = field(default_factory=list)  # until the first token of each worker that went on
    _count: int = 0
    _fruitless: int = 0
    _num_tokens: int = 0  # over all choices, when it was resumed last
    _since: float | None = None  # it has not gone on

    @property
    def is_paused(self) -> bool:
        """No other worker has gone on with it yet."""
        return self._since is not None

    def add(self, lost: WorkerLost, *, is_lost: bool, num_tokens: int) -> None:
        """`is_lost`: else it stops in order. Raises `lost` where no other worker is to go on."""
        self._count += is_lost
        self._fruitless = 0 if num_tokens > self._num_tokens else self._fruitless + 1
        if self._count > MAX_LOSSES or self._fruitless > MAX_FRUITLESS:
            raise lost

    def pause(self, why: str, num_tokens: int, now: float) -> None:
        self._num_tokens, self.why = num_tokens, why
        if self._since is None:
            self._since = now

    def go_on(self, now: float) -> None:
        if self._since is not None:
            self.pauses_s.append(now - self._since)
            self._since = None
