"""Validation reports: their stages, their verdicts, and how large they get."""

from __future__ import annotations

import json
from typing import Any

from manylora_router.quality.report import (
    MAX_REPORT_BYTES,
    MAX_SHOWN_CHARS,
    MAX_SHOWN_SAMPLES,
    STAGES,
    Judged,
    Measured,
    Report,
    digest_of,
    load_part,
    quality_part,
)
from manylora_router.quality.samples import Sample
from manylora_shared.errors import FieldViolation
from manylora_shared.tenancy.adapter_gate import GateRule, Verdict

BEGUN = Report("acme", "lower", "a" * 64, 5.0)


def told(report: Report) -> dict[str, Any]:
    return json.loads(report.to_json())


def test_stages_stand_in_order_and_the_verdict_is_the_worst() -> None:
    report = BEGUN.passed("format").passed("quality", "fine").unknown("load", "no answer")
    assert report.verdict is Verdict.PASSED
    assert [each["stage"] for each in told(report)["stages"]] == list(STAGES)
    assert [each["state"] for each in told(report)["stages"]] == [
        "passed", "skipped", "skipped", "skipped", "passed", "inconclusive",
    ]  # fmt: skip
    failed = report.failed("quality", "worse").violated([FieldViolation("r", "is odd")])
    assert (failed.verdict, failed.reasons) == (Verdict.REJECTED, ("worse",))
    assert told(failed)["problems"] == [{"field": "r", "description": "is odd"}]
    assert report.left_open("quality", "lost").verdict is Verdict.INCONCLUSIVE
    assert digest_of(failed.to_json()) != digest_of(report.to_json())


def test_what_became_worse_is_shown_first_and_texts_are_cut() -> None:
    samples = [Sample(f"ask {i}" + "x" * 9999, [], "e", None, None) for i in range(60)]
    own = [Judged("a" * 9999, float(i % 2)) for i in range(60)]
    before = [Judged("b", 1.0 if i == 4 else float(i % 2)) for i in range(60)]
    part = quality_part(GateRule("golden"), ["exact"] * 60, samples, {"candidate": own, "before": before, "base": own})
    assert part["scores"] == {"candidate": 0.5, "before": round(31 / 60, 6), "base": 0.5}
    assert (part["better"], part["worse"], len(part["shown"])) == (0, 1, MAX_SHOWN_SAMPLES)
    assert [each["sample"] for each in part["shown"][:3]] == [5, 1, 3]
    assert len(part["shown"][0]["asked"]) == len(part["shown"][0]["answers"]["candidate"]["answer"])
    assert len(part["shown"][0]["asked"]) == MAX_SHOWN_CHARS + 3


def test_figures_of_load_are_of_each_version() -> None:
    measured = {"candidate": [Measured(3.0, 1.0, 9.0), Measured(1.0, 2.0, 0.0)], "before": [Measured(2.0, 0.0, 0.0)]}
    part = load_part(measured, {"candidate": 10})
    assert part["candidate"] == {
        "requests": 2, "ttft_p50_ms": 2.0, "ttft_max_ms": 3.0, "token_p50_ms": 1.5, "adapter_wait_max_ms": 9.0,
        "size_bytes": 10,
    }  # fmt: skip
    assert part["before"]["size_bytes"] == 0


def test_a_report_of_thousands_of_modules_stays_small() -> None:
    modules = [{"path": "layers." + "x" * 300, "rank": 8}] * 4096
    assert len(BEGUN.with_part("modules", modules).to_json()) < MAX_REPORT_BYTES
