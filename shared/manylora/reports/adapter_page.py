"""An adapter's validation report as a page: one HTML file that needs nothing else. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid #d8dde3 } th { font-weight: 600 } td.n, th.n { text-align: right }
pre { margin: 0; white-space: pre-wrap; word-break: break-word; font-size: 13px }
.passed { color: #116329 } .failed, .rejected { color: #a40e26 } .inconclusive { color: #8a5a00 }
.skipped { color: #667 }
.mark { font-weight: 600 } small { color: #59636e }
"""
_SUBJECTS = (("candidate", "this version"), ("before", "version in force"), ("base", "base model"))


def adapter_page(report: Mapping[str, Any], *, version: int = 0) -> str:
    """version: its number; 0: it is not registered."""
    name = report["name"] or "an adapter"
    title = f"{report['tenant_id']}/{name}" + (f"@{version}" if version else "")
    verdict = report["verdict"]
    made = datetime.fromtimestamp(report["created_unix_s"], UTC).isoformat(timespec="seconds")
    parts = [
        f"<h1>{_text(title)}: <span class='{_text(verdict)}'>{_text(verdict)}</span></h1>",
        f"<small>{_text(made)} &middot; digest {_text(report['digest'] or 'unknown')}</small>",
        _list(report["reasons"]),
        "<h2>Stages</h2>",
        _table(("stage", "outcome", ""), [_stage(each) for each in report["stages"]]),
        *_quality(report.get("quality")),
        *_load(report.get("load")),
        *_changes(report),
    ]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{_text(title)}</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _stage(stage: Mapping[str, Any]) -> tuple[str, str, str]:
    state = _text(stage["state"])
    return _text(stage["stage"]), f"<span class='mark {state}'>{state}</span>", _text("; ".join(stage["told"]))


def _quality(quality: Mapping[str, Any] | None) -> list[str]:
    if quality is None:
        return []
    rule, scores = quality["rule"], quality["scores"]
    bounds = ", ".join(
        f"{name} {rule[name]:g}" for name in ("min_score", "max_drop", "min_gain") if rule[name] is not None
    )
    rows = [(_text(said), _number(scores[name])) for name, said in _SUBJECTS if name in scores]
    told = (
        f"{quality['samples']['count']} samples ({quality['samples']['name']}), judged by {rule['judge']}; {bounds}. "
        f"{quality['better']} better than what it is compared with, {quality['worse']} worse."
    )
    page = ["<h2>Quality</h2>", f"<p>{_text(told)}</p>", _table(("", "score"), rows, numbers=True)]
    if quality["shown"]:
        subjects = [(name, said) for name, said in _SUBJECTS if name in scores]
        columns = ("#", "asked", "expected", *(said for _, said in subjects))
        page += [
            "<h2>Samples that it gets wrong</h2>",
            _table(columns, [_sample(s, subjects) for s in quality["shown"]]),
        ]
    return page


def _sample(sample: Mapping[str, Any], subjects: Sequence[tuple[str, str]]) -> list[str]:
    answers = [sample["answers"][name] for name, _ in subjects]
    told = [f"{_pre(each['answer'])}<small>{_number(each['score'])}</small>" for each in answers]
    return [str(int(sample["sample"])), _pre(sample["asked"]), _pre(sample["expected"]), *told]


def _load(load: Mapping[str, Any] | None) -> list[str]:
    if load is None:
        return []
    columns = ("", "first token, median ms", "longest ms", "each further token ms", "wait for weights ms", "bytes")
    rows = [
        (
            _text(said),
            *(
                _number(load[name][key])
                for key in ("ttft_p50_ms", "ttft_max_ms", "token_p50_ms", "adapter_wait_max_ms")
            ),
            f"{int(load[name]['size_bytes']):,}",
        )
        for name, said in _SUBJECTS
        if name in load
    ]
    return ["<h2>Load</h2>", _table(columns, rows, numbers=True)]


def _changes(report: Mapping[str, Any]) -> list[str]:
    modules: Sequence[Mapping[str, Any]] = report.get("modules", ())
    if not modules:
        return []
    by_kind: dict[tuple[str, int], int] = {}
    for module in modules:
        kind = module["path"].rpartition(".")[2], module["rank"]
        by_kind[kind] = by_kind.get(kind, 0) + 1
    rows = [(_text(kind), str(int(rank)), str(count)) for (kind, rank), count in sorted(by_kind.items())]
    coverage, base = report["coverage"], report.get("base", {})
    told = (
        f"{len(modules)} of {coverage['layers']} layers of {base.get('name', 'the base model')} "
        f"({base.get('digest', '')[:12]}), by {coverage['tensors'] - coverage['tensors_left_out']} of "
        f"{coverage['tensors']} tensors."
    )
    page = ["<h2>What it changes</h2>", f"<p>{_text(told)}</p>", _table(("modules", "rank", "layers"), rows)]
    if coverage["left_out"]:
        page += ["<p>Left out, for no text goes through them:</p>", _list(coverage["left_out"])]
    return page


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Cells are HTML."""
    kind = [" class='n'" if numbers and index else "" for index in range(len(columns))]
    head = "".join(f"<th{k}>{_text(column)}</th>" for k, column in zip(kind, columns, strict=True))
    lines = ["".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _pre(text: str) -> str:
    return f"<pre>{_text(text)}</pre>"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(text: str) -> str:
    return escape(str(text), quote=True)
