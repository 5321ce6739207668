"""The page of a validation report: all of it is there, nothing of it is code."""

from __future__ import annotations

import html.parser
from typing import Any

from manylora.reports.adapter_page import adapter_page

SHARP = "<script>alert('&')</script>"
FIGURES = {
    "requests": 8, "ttft_p50_ms": 12.5, "ttft_max_ms": 40.0, "token_p50_ms": 2.25, "adapter_wait_max_ms": 7.5,
    "size_bytes": 318376,
}  # fmt: skip
REPORT: dict[str, Any] = {
    "format_version": 1,
    "tenant_id": "acme",
    "name": "upper",
    "digest": "ab" * 32,
    "created_unix_s": 1_700_000_000.0,
    "verdict": "rejected",
    "reasons": ["its score 0.5 is more than max_drop 0.02 below the 1 of the version in force"],
    "stages": [
        {"stage": "format", "state": "passed", "told": []},
        {"stage": "quality", "state": "failed", "told": ["its score is lower"]},
        {"stage": "load", "state": "skipped", "told": []},
    ],
    "base": {"name": "demo", "digest": "cd" * 32, "vocab_size": 259, "max_context_tokens": 2048, "max_lora_rank": 64},
    "adapter": {"rank": 8, "size_bytes": 318376, "target_modules": ["q_proj"]},
    "modules": [{"path": f"model.layers.{i}.self_attn.q_proj", "rank": 8} for i in range(4)],
    "coverage": {"layers": 28, "tensors": 9, "tensors_left_out": 1, "left_out": [f"vision.{SHARP}"]},
    "quality": {
        "samples": {"name": "golden", "count": 2},
        "rule": {"judge": "exact", "min_score": 0.9, "max_drop": 0.02, "min_gain": None, "max_tokens": 128},
        "scores": {"candidate": 0.5, "before": 1.0, "base": 0.0},
        "better": 0,
        "worse": 1,
        "shown": [
            {
                "sample": 2,
                "judge": "exact",
                "asked": f"user: {SHARP}",
                "expected": "A",
                "answers": {
                    "candidate": {"answer": SHARP, "score": 0.0},
                    "before": {"answer": "A", "score": 1.0},
                    "base": {"answer": "a", "score": 0.0},
                },
            }
        ],
    },
    "load": {"candidate": FIGURES, "before": FIGURES},
}


class Seen(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Seen:
    seen = Seen()
    seen.feed(page)
    return seen


def test_all_of_it_is_there_and_texts_are_texts() -> None:
    seen = read(adapter_page(REPORT, version=2))
    assert "script" not in seen.tags
    assert seen.text.count(SHARP) == 3
    for told in (
        "acme/upper@2: rejected", "2023-11-14T22:13:20+00:00", "its score is lower", "min_score 0.9, max_drop 0.02",
        "2 samples (golden), judged by exact", "12.5", "318,376", "4 of 28 layers of demo (cdcdcdcdcdcd), by 8 of 9",
        "this version", "version in force", "base model",
    ):  # fmt: skip
        assert told in seen.text, told


def test_a_report_of_files_that_could_not_be_read_has_a_page() -> None:
    stages = [{"stage": "format", "state": "failed", "told": ["r: is odd"]}]
    short = {k: v for k, v in REPORT.items() if k not in ("modules", "coverage", "quality", "load", "base", "adapter")}
    seen = read(adapter_page({**short, "name": "", "digest": "", "stages": stages}))
    assert "acme/an adapter: rejected" in seen.text
    assert "r: is odd" in seen.text
