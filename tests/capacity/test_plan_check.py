"""What `bench/plan_check.py` measures from outside, and what it was on a GPU."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import Curve, curve_of, find_curve
from manylora.capacity.planning.shapes import gpu_of
from manylora.capacity.planning.traffic import Request
from manylora.capacity.planning.worker import Running, Worker, WorkerSettings

from bench import plan_check

SETTINGS = WorkerSettings(slots=64, kv_tokens=400_000, adapter_bytes=1 << 34)
SEEN = Path(plan_check.__file__).parent / "results" / "h100" / "plan_check.jsonl"


class Played(plan_check.Bench):
    """A worker that the planner plays, in place of a cluster. One measured step of prompts is in a full batch."""

    curve: Curve

    async def closed(
        self, streams: int, prompt: int, output: int | Mapping[str, float], adapters: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        assert not isinstance(output, int)
        worker, now = Worker(self.curve, SETTINGS, lambda *_: None), 0.0
        rng, least, mean = random.Random(35), int(output["min"]), int(output["mean"])
        ended: list[Running] = []

        def request() -> Running:
            return Running(Request(now, "a", "standard", "", 0, prompt, rng.randrange(least, 2 * mean - least), 0))

        for _ in range(streams):
            worker.add(request(), now)
        while now < 10:
            seconds = worker.begin(now, now)
            assert seconds is not None
            now += seconds
            for running in worker.end(now):
                ended.append(running)
                worker.add(request(), now)
        took_ms = [(running.ended_at - running.request.at_s) * 1e3 for running in ended]
        tokens = sum(running.request.output_tokens for running in ended)
        return {
            "completed": len(ended),
            "output_tokens": tokens,
            "e2e_ms": {"mean": sum(took_ms) / len(ended)},
        }


@pytest.mark.parametrize("prompt_ms", [0.01, 0.025, 0.1])
async def test_what_a_prompts_token_costs_a_full_batch_is_found(prompt_ms: float) -> None:
    bench = Played(argparse.Namespace(slots=SETTINGS.slots), "", "", (), 16)
    curve = replace(packaged_curves()[0], prompt_token_ms=prompt_ms)
    object.__setattr__(bench, "curve", curve)
    assert await plan_check.prompt_token_ms(bench, curve.kv_token_ms) == pytest.approx(prompt_ms, rel=0.15, abs=0.0025)


def test_the_packaged_curve_predicts_what_an_h100_did_within_15_percent() -> None:
    """By today's planner: what was predicted when the H100 ran is in the same line."""
    (line,) = [json.loads(text) for text in SEEN.read_text().splitlines()]
    names = [f"copy-{number}" for number in range(line["adapters"])]
    arguments = argparse.Namespace(prompt=200, output=96, load=line["load"], load_seconds=40.0)
    mix = plan_check.mix_of_load(plan_check.Bench(arguments, "", "", names, 16), curve_of(line["curve"]))
    packaged = find_curve(packaged_curves(), gpu_of("H100"), curve_of(line["curve"]).shape)
    assert packaged.is_measured
    expected = plan_check.predicted(plan_check.traffic_of(mix, arguments.load_seconds, 16), packaged, line["slots"])
    for name, value in line["seen"].items():
        assert expected[name] == pytest.approx(value, rel=0.15), name
