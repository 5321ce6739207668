"""What holds for every parser of bytes from outside: whatever they are, a documented error or a result, and soon.

A harness is a module of tests/fuzz/parsers with one `HARNESS`. Its corpus is tests/fuzz/corpus/<name>/: inputs that
reach something, and those that found a bug (found-*). `run.py` looks for more; test_fuzz_corpus.py replays them.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manylora_shared.errors import ManyloraError
from manylora_shared.transport.status import encode_details, message_of

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
NAMES = tuple(sorted(path.stem for path in (FOLDER / "parsers").glob("[a-z]*.py")))
MAX_GROWTH_BYTES = 256 << 20  # of the process, by one input


@dataclass(frozen=True)
class Harness:
    run: Callable[[bytes], object]
    documented: tuple[type[Exception], ...] = ()  # beside a ManyloraError that blames the caller
    max_cpu_s: float = 1.0
    max_bytes: int = 4096
    is_json: bool = False  # its inputs are JSON, so that they can be changed as such


class Finding(AssertionError):
    """An input that a parser did not take as it should."""


def load(name: str) -> Harness:
    harness: Harness = importlib.import_module(f"tests.fuzz.parsers.{name}").HARNESS
    with suppress(Exception):  # the first one waits for models and libraries; it is checked later
        harness.run(next(corpus_of(name)).read_bytes())
    return harness


def corpus_of(name: str) -> Iterator[Path]:
    yield from sorted((CORPUS / name).iterdir())


def check(harness: Harness, data: bytes, *, slack: float = 1.0) -> None:
    """Raises Finding, or what the parser should not have raised. `slack`: of the time, for instrumented code."""
    before_bytes, began_s = _peak_bytes(), time.process_time()
    try:
        harness.run(data)
    except ManyloraError as error:
        if not 400 <= error.http.status < 500:
            raise Finding(f"{error.label} is not the caller's fault: {error.message}") from error
        message_of(error).encode()
        encode_details(error)  # what cannot be sent is a failure of the service
    except harness.documented:
        pass
    took_s, grew_bytes = time.process_time() - began_s, _peak_bytes() - before_bytes
    if took_s > harness.max_cpu_s * slack:
        raise Finding(f"{len(data)} bytes took {took_s:.2f} s of a core")
    if grew_bytes > MAX_GROWTH_BYTES:
        raise Finding(f"{len(data)} bytes took {grew_bytes >> 20} MiB")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
