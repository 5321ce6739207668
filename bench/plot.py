"""Draws what bench/engine.py measured: a decode step by rows and adapters, beside the time that its bytes take.

    python bench/plot.py [bench/results/h200/engine-llama-3.1-8b.jsonl] [docs/decode-step.svg]

Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CASES = {
    "decode-base": ("no adapters", "#4c566a"),
    "decode-one": ("one adapter for all rows", "#2a7fba"),
    "decode-distinct": ("every row its own, 64 in all", "#c2571a"),
}
RESULTS = Path(__file__).parent / "results" / "h200" / "engine-llama-3.1-8b.jsonl"
PICTURE = Path(__file__).parent.parent / "docs" / "decode-step.svg"


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines by case, in order of rows."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {case: sorted((x for x in lines if x["case"] == case), key=lambda x: int(x["batch"])) for case in CASES}


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manylora"  # the same picture from the same numbers
    from matplotlib import pyplot

    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    by_case = read(results)
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    for case, (label, color) in CASES.items():
        rows = [line["batch"] for line in by_case[case]]
        axes.plot(rows, [line["ms_per_step"] for line in by_case[case]], "o-", color=color, label=label)
        axes.plot(rows, [line["floor_ms"] for line in by_case[case]], ":", color=color, linewidth=1)
    axes.plot([], [], ":", color="#4c566a", linewidth=1, label="its weights, KV and adapters, read once")
    axes.set_xscale("log", base=2)
    ticks = [line["batch"] for line in by_case["decode-base"]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows")
    axes.set_ylabel("ms a decode step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
