"""Looks for inputs that break a parser: `python -m tests.fuzz.run SECONDS [NAME ...]`, or `make fuzz`.
The seconds are dealt to the harnesses.

Each harness has a process of its own, in which Atheris (libFuzzer) watches which branches of the product an input
takes, and keeps those that took new ones. What it keeps goes to a folder of the machine's, not to the corpus; what
breaks a parser is written to tests/fuzz/found/<name>-<digest>, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import harness as harnesses
from tests.fuzz.mutation import mutated

FOUND = harnesses.FOLDER / "found"
SLACK = 8.0  # instrumented code, on a machine with other work
MAX_RSS_MB = 4096
HANG_S = 60
INSTRUMENTED = ("manylora_shared", "manylora_router", "manylora_scheduler", "manylora_worker")


def main() -> None:
    names = sys.argv[2:] or list(harnesses.NAMES)
    seconds = max(1, int(sys.argv[1]) // len(names))
    FOUND.mkdir(exist_ok=True)
    failed = []
    for name in names:
        print(f"== {name}: {seconds} s", flush=True)
        if subprocess.run([sys.executable, "-m", "tests.fuzz.run", "--one", name, str(seconds)]).returncode:
            failed.append(name)
    print(f"== {len(names)} parsers, broken: {', '.join(failed) or 'none'}")
    raise SystemExit(1 if failed else 0)


def fuzz(name: str, seconds: str) -> None:
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED), enable_loader_override=False):
        harness = harnesses.load(name)
    logging.disable()
    rng, words = random.Random(name), []

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng.seed(seed)
        new = mutated(data, rng, words) if harness.is_json and rng.random() < 0.9 else None
        return atheris.Mutate(data, max_size) if new is None or len(new) > max_size else new

    def test(data: bytes) -> None:
        harnesses.check(harness, data, slack=SLACK)

    kept = Path(tempfile.gettempdir()) / f"manylora-fuzz-{os.getuid()}" / name
    kept.mkdir(parents=True, exist_ok=True)
    dictionary = kept.with_suffix(".words")
    seeds = b" ".join(path.read_bytes() for path in harnesses.corpus_of(name))
    found = sorted({word.decode() for word in re.findall(rb"[a-zA-Z_]{3,40}", seeds)})
    dictionary.write_text("".join(f'"{word}"\n' for word in found))
    flags = [f"-max_total_time={seconds}", f"-max_len={harness.max_bytes}", f"-rss_limit_mb={MAX_RSS_MB}"]
    flags += [
        f"-timeout={HANG_S}",
        f"-artifact_prefix={FOUND}/{name}-",
        "-reload=0",
        "-report_slow_units=3600",
        f"-dict={dictionary}",
    ]
    atheris.Setup(
        [sys.argv[0], *flags, str(kept), str(harnesses.CORPUS / name)],
        test,
        **({"custom_mutator": change} if harness.is_json else {}),
    )
    with contextlib.suppress(KeyboardInterrupt):
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        fuzz(*sys.argv[2:])
    else:
        main()
