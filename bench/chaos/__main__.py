"""Kills, freezes, drains, cuts and fills parts of a real cluster under load, one after the other, and tells what its
callers saw of each.

Real processes: etcd, two schedulers, two routers, two workers of the demo's model on the CPU, started again when they
end. Cuts need root and network namespaces, a full disk root, clocks libfaketime (Debian: faketime): what is missing is
said, and left out. Prints JSON lines: {"bench": "chaos", "fault", ...}, and a table on stderr. Exits with 1 where a
fault did more than is stated.

    python -m bench.chaos [--only WORDS] [--fake]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.client import RequestFailed
from manylora.local.cluster import ClusterFailed

from bench.chaos import network
from bench.chaos.callers import Callers, Summary, baseline
from bench.chaos.cluster import FAKETIME, ChaosCluster, Setting
from bench.chaos.faults import FAULTS, Fault, lasts

_BEFORE_S, _AFTER_S = 2.0, 1.5


async def suffer(cluster: ChaosCluster, fault: Fault, answers: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """One fault under load. Returns its line."""
    await cluster.whole()
    epoch = await cluster.epoch()
    callers = Callers(cluster, answers)
    callers.start()
    await asyncio.sleep(_BEFORE_S)
    began_s = time.monotonic()
    await lasts(fault, cluster)
    ended_s = time.monotonic()
    await cluster.whole()
    whole_s = time.monotonic()
    await asyncio.sleep(_AFTER_S)
    until_s = time.monotonic()
    await callers.end()
    has_led = await cluster.epoch() == epoch
    return line_of(fault, callers.summary(began_s, until_s), whole_s - ended_s, new_leader=not has_led)


def line_of(fault: Fault, seen: Summary, whole_after_s: float, *, new_leader: bool = False) -> dict[str, Any]:
    told = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in dataclasses.asdict(seen).items()
    }
    broken = fault.effect.broken(seen)
    if new_leader != fault.effect.new_leader and fault.effect.new_leader is not None:
        broken.append("another scheduler leads" if new_leader else "no other scheduler leads: nothing was done")
    effect = dataclasses.asdict(fault.effect)
    head = {"bench": "chaos", "fault": fault.name, "contained": not broken, "beyond": broken}
    return {**head, **told, "new_leader": new_leader, "whole_after_s": round(whole_after_s, 2), "stated": effect}


def skipped(fault: Fault, setting: Setting) -> bool:
    return bool(fault.needs) and not getattr(setting, fault.needs)


async def run(faults: Sequence[Fault], setting: Setting) -> list[dict[str, Any]]:
    lines = []
    with tempfile.TemporaryDirectory(prefix="manylora-chaos-") as folder:
        async with ChaosCluster(Path(folder), setting) as cluster:
            answers = await baseline(cluster)
            for fault in faults:
                lines.append(await suffer(cluster, fault, answers))
                print(json.dumps(lines[-1]), flush=True)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, as docs/FIGURES.md has it."""
    rows = [
        "| fault | client's errors | plain callers' errors | changed | resumed | pause p95, s | others' TTFT p95, ms "
        "| others' availability | new leader | whole again after, s | contained |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        errors = [_errors(line["errors"][c], line["requests"][c]) for c in ("patient", "plain")]
        pause, ttft = line["pause_p95_s"], line["calm_ttft_p95_ms"]
        cells = [
            line["fault"],
            *errors,
            str(line["changed"]),
            str(line["resumed"]),
            "-" if pause is None else f"{pause:.2f}",
            "-" if ttft is None else f"{ttft:.0f}",
            f"{100 * line['availability']:.1f} %",
            "yes" if line["new_leader"] else "",
            f"{line['whole_after_s']:.1f}",
            "yes" if line["contained"] else "**no**: " + "; ".join(line["beyond"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _errors(errors: Mapping[str, int], requests: int) -> str:
    told = ", ".join(f"{count} {code}" for code, count in errors.items())
    return f"{told} of {requests}" if told else f"0 of {requests}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose names have one of these, with commas")
    parser.add_argument("--fake", action="store_true", help="workers whose model computes nothing")
    arguments = parser.parse_args(argv)
    words = [word.strip() for word in arguments.only.split(",") if word.strip()]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    problem = network.is_possible()
    setting = Setting(networks=not problem, has_disk=not problem, is_fake=arguments.fake)
    clocks = dataclasses.replace(setting, clocks=FAKETIME.exists())
    if problem:
        print(f"nothing is cut, and no disk is filled: {problem}", file=sys.stderr)
    if not clocks.clocks:
        print("no clock is set: there is no libfaketime (Debian: apt install faketime)", file=sys.stderr)
    lines: list[dict[str, Any]] = []
    for each, of_clocks in ((setting, False), (clocks, True)):
        chosen = [f for f in faults if (f.needs == "clocks") == of_clocks and not skipped(f, each)]
        if not chosen:
            continue
        try:
            lines += asyncio.run(run(chosen, each))
        except (ClusterFailed, RequestFailed, TimeoutError) as error:
            if not of_clocks:
                raise
            print(f"no clock is set, for services do not run under this libfaketime: {error}", file=sys.stderr)
    print(table(lines), file=sys.stderr)
    return int(not all(line["contained"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
