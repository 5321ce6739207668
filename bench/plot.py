"""Draws what the benchmarks measured, for the documents.

    python bench/plot.py decode-step [RESULTS...] [--path docs/decode-step.svg]
    python bench/plot.py isolation [RESULTS...] [--path docs/isolation.svg]

`decode-step`: bench/engine.py's steps by rows and adapters, beside the time that their bytes take. `isolation`:
bench/isolation.py's victim beside each attack, fair and in order of arrival, and alone. Of several lines of one case
the last counts. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = {
    "decode-base": ("no adapters", "#4c566a"),
    "decode-one": ("one adapter for all rows", "#2a7fba"),
    "decode-distinct": ("every row its own, 64 in all", "#c2571a"),
}
POLICIES = {
    "none": ("alone", "#4c566a"),
    "fair": ("fair", "#2a7fba"),
    "fcfs": ("in order of arrival", "#c2571a"),
}
ATTACKS = {
    "short": "short\nrequests",
    "long-prompts": "longest\nprompts",
    "long-outputs": "longest\ngenerations",
    "adapters": "adapters\nin turn",
    "slow-readers": "slow\nreaders",
    "prefixes": "long\nprefixes",
}
Line = dict[str, Any]


def draw_decode_step(axes: Any, lines: list[Line]) -> None:
    found = {(line["case"], line["batch"]): line for line in lines if line["case"] in STEPS}
    by_case = {case: [found[key] for key in sorted(found) if key[0] == case] for case in STEPS}
    for case, (label, color) in STEPS.items():
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


def draw_isolation(axes: Any, lines: list[Line]) -> None:
    """Of the torch engine, with roomy KV: `num_blocks` and the reserve as they are by default."""
    seen: dict[tuple[str, str], float] = {}
    for line in lines:
        if line["engine"] == "torch" and not line["victim_reserve_mb"]:
            attack = line["before"] if line["attack"] == "none" else line["attack"]
            seen[attack, "none" if line["attack"] == "none" else line["policy"]] = line["victim_ttft_p95_ms"]
    attacks = [attack for attack in ATTACKS if (attack, "fair") in seen]
    width = 0.8 / len(POLICIES)
    for i, (policy, (label, color)) in enumerate(POLICIES.items()):
        places = [at + (i - 1) * width for at in range(len(attacks))]
        axes.bar(places, [seen[attack, policy] for attack in attacks], width * 0.92, color=color, label=label)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    axes.set_xticks(range(len(attacks)), [ATTACKS[attack] for attack in attacks])
    axes.set_ylabel("ms to the first token, 95th percentile")


PICTURES = {
    "decode-step": (
        draw_decode_step,
        ["bench/results/h200/engine.jsonl"],
        "docs/decode-step.svg",
    ),
    "isolation": (draw_isolation, ["bench/results/h200/isolation.jsonl"], "docs/isolation.svg"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--path", type=Path, help="of the picture")
    arguments = parser.parse_args()
    draw, results, path = PICTURES[arguments.picture]

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manylora"  # the same picture from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    files = arguments.results or [ROOT / file for file in results]
    draw(axes, [json.loads(line) for file in files for line in file.read_text().splitlines()])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(arguments.path or ROOT / path, metadata={"Date": None})


if __name__ == "__main__":
    main()
