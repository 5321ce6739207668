"""Scores answers whose judges may cost much: `python -m manylora_router.quality.judge_process`, with bounds of its own.

Reads one JSON list of [judge, expected, answer] from stdin and writes one of scores, or of texts: why there is none.
"""

from __future__ import annotations

import json
import resource
import sys

from manylora_router.quality.judges import score

MAX_CPU_S = 20
MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    told: list[float | str] = []
    for judge, expected, answer in json.load(sys.stdin):
        try:
            told.append(score(judge, expected, answer))
        except ValueError as e:
            told.append(str(e)[:200])
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
