"""A constraint that is no grammar, and whose masks come as late as a test wants them."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

END = 0


def allows(output: SequenceOf[int], token_id: int) -> bool:
    """Half of the tokens, by what was drawn before; the end of the text now and then."""
    last = output[-1] if output else 0
    return (token_id * 31 + last * 17 + len(output)) % (5 if token_id == END else 2) == 0


@dataclass
class Odd:
    """See kinds.constraint.CompiledConstraint. late: of a hundred masks so many are not there when they are asked for;
    length: the text is whole then; breaks_at: as many tokens cannot be followed.
    """

    late: int
    length: int = 1000
    breaks_at: int = 1000
    vocab_size: int = 259
    end_token_ids = (END,)

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """See kinds.constraint.Matcher."""

    def __init__(self, kind: Odd) -> None:
        self._kind = kind
        self._rng = random.Random(kind.late)
        self._output: list[int] = []
        self._polls = 0
        self.mask = b""

    def take(self, token_ids: SequenceOf[int]) -> None:
        for token_id in token_ids:
            assert allows(self._output, token_id), "a token outside the constraint"
            self._output.append(token_id)
        self.mask = b""
        self._polls = self._rng.randint(1, 12) if self._rng.randrange(100) < self._kind.late else 0

    def is_done(self, *, waits: bool) -> bool:
        self._polls = max(0, self._polls - 1)
        if self._polls == 0 and not self.mask:
            bits = sum(1 << token for token in range(self._kind.vocab_size) if allows(self._output, token))
            self.mask = bits.to_bytes(-(-self._kind.vocab_size // 32) * 4, "little")
        return self._polls == 0

    @property
    def is_over(self) -> bool:
        return len(self._output) >= self._kind.length

    @property
    def error(self) -> str:
        return "it is too much" if len(self._output) >= self._kind.breaks_at else ""
