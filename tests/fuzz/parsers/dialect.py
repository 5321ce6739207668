"""A model's answer, in every family's way of writing calls and reasoning: read alike however it is cut."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence

from manylora_router.dialect.blocks import Blocks
from manylora_router.dialect.dialect import THINKING, Dialect
from manylora_router.dialect.grammars import FAMILIES

from tests.fuzz.harness import Harness

_NAMES = ("f", "get_weather")
_DIALECTS = [Dialect(family, thinking) for family in FAMILIES.values() for thinking in (None, *THINKING.values())]


def run(data: bytes) -> None:
    """A byte that chooses the dialect, and the text."""
    dialect = _DIALECTS[data[0] % len(_DIALECTS)] if data else _DIALECTS[0]
    text = data[1:].decode(errors="replace")
    rng = random.Random(zlib.crc32(data))
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(6))})
    parts = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert _read(dialect, [text]) == _read(dialect, parts), parts


def _read(dialect: Dialect, parts: Sequence[str]) -> list[tuple[object, str, str]]:
    reader, blocks = dialect.reader(_NAMES, ""), Blocks()
    for piece in itertools.chain(*map(reader.push, parts), reader.finish()):
        blocks.add(piece)
    return [(block.kind, block.name, block.text) for block in blocks.all]


HARNESS = Harness(run)
