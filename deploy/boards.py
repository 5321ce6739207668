"""Writes Grafana's boards and Prometheus' rules from the registry of metrics: they name nothing that is not there.

    python deploy/boards.py [--check]

--check: writes nothing, and fails where a file is not as it would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared"))
from manylora_shared.telemetry.names import Attribute  # noqa: E402
from manylora_shared.telemetry.registry import LABELS, Metric, Metrics  # noqa: E402

BOARDS = ROOT / "deploy/grafana/dashboards"
RULES = ROOT / "deploy/prometheus/rules.yml"
CHART_RULES = ROOT / "deploy/helm/manylora/files/rules.yml"  # a chart reads no file beyond its folder
WINDOW = "$__rate_interval"
_TENANT, _CLASS, _TIER = Attribute.TENANT_ID, Attribute.QOS_CLASS, Attribute.TIER
_CHOSEN = {_TENANT: "$tenant"}
_VERSION = (_TENANT, Attribute.ADAPTER_ID, Attribute.ADAPTER_NUMBER)
_VERSIONS = "{{tenant}} {{adapter}} {{version}}"


def labels_of(metric: Metric, by: Sequence[str]) -> str:
    assert set(by) <= set(metric.labels), (metric.name, by)
    return ", ".join(LABELS[name] for name in by)


def selected(metric: Metric, chosen: Mapping[str, str], series: str = "") -> str:
    labels_of(metric, list(chosen))
    inner = ", ".join(f'{LABELS[name]}=~"{value}"' for name, value in chosen.items())
    return (series or metric.series) + (f"{{{inner}}}" if inner else "")


def rate(metric: Metric, *by: str, window: str = WINDOW, chosen: Mapping[str, str] | None = None) -> str:
    """Of a counter, or of a histogram's observations."""
    series = f"{metric.name}_count" if metric.kind == "histogram" else metric.series
    return f"sum by ({labels_of(metric, by)}) (rate({selected(metric, chosen or {}, series)}[{window}]))"


def quantile(metric: Metric, part: float, *by: str, chosen: Mapping[str, str] | None = None) -> str:
    assert metric.kind == "histogram", metric.name
    names = ", ".join(["le", *([labels_of(metric, by)] if by else [])])
    return f"histogram_quantile({part}, sum by ({names}) (rate({selected(metric, chosen or {})}[{WINDOW}])))"


def _mean(metric: Metric, *by: str) -> str:
    """Of a histogram's observations."""
    total = f"sum by ({labels_of(metric, by)}) (rate({metric.name}_sum[{WINDOW}]))"
    return f"{total} / {rate(metric, *by)}"


def gauge(metric: Metric, *by: str, chosen: Mapping[str, str] | None = None, over: str = "sum") -> str:
    assert metric.kind == "gauge", metric.name
    return f"{over} by ({labels_of(metric, by)}) ({selected(metric, chosen or {})})"


def each(metric: Metric) -> str:
    """Of every process."""
    return f"sum by (instance) ({metric.series if metric.kind == 'gauge' else f'rate({metric.series}[{WINDOW}])'})"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: Mapping[str, str]  # by legend
    help: str = ""


def _quantiles(metric: Metric, *by: str, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
    legend = " ".join(f"{{{{{LABELS[name]}}}}}" for name in by)
    return {f"{legend} p{round(p * 100)}".strip(): quantile(metric, p, *by, chosen=chosen) for p in (0.5, 0.95)}


def _budget_left(window: str) -> str:
    flow = labels_of(Metrics.SLO_REQUESTS, (_TENANT, _CLASS))
    bad = f'sum by ({flow}) (increase({Metrics.SLO_REQUESTS.series}{{verdict="bad"}}[{window}]))'
    every = f"sum by ({flow}) (increase({Metrics.SLO_REQUESTS.series}[{window}]))"
    spare = f"(1 - max by ({flow}) ({Metrics.SLO_AVAILABILITY_TARGET.series}))"
    return f"1 - (({bad} or 0 * {every}) / {every}) / {spare}"


CLUSTER = (
    Panel("Requests", "reqps", {"{{class}}": rate(Metrics.REQUESTS, _CLASS)}),
    Panel("How they ended", "reqps", {"{{outcome}}": rate(Metrics.OUTCOMES, Attribute.OUTCOME)}),
    Panel("Refused before the queue", "reqps", {"{{reason}}": rate(Metrics.REJECTIONS, Attribute.REASON)}),
    Panel(
        "Tokens a second",
        "short",
        {
            "prompt": rate(Metrics.PROMPT_TOKENS),
            "of these cached": rate(Metrics.CACHED_TOKENS),
            "completion": rate(Metrics.COMPLETION_TOKENS),
        },
    ),
    Panel("Time to the first token", "s", _quantiles(Metrics.TTFT, _CLASS)),
    Panel("Time in the queue", "s", _quantiles(Metrics.QUEUE_WAIT, _CLASS)),
    Panel("Time for each token", "s", _quantiles(Metrics.TPOT, _CLASS)),
    Panel("Between tokens of a stream", "s", _quantiles(Metrics.INTER_TOKEN, _CLASS)),
    Panel("From arrival to the end", "s", _quantiles(Metrics.E2E, _CLASS)),
    Panel("By operation", "s", _quantiles(Metrics.GENAI_DURATION, Attribute.GENAI_OPERATION)),
    Panel("Live requests", "short", {"{{instance}}": each(Metrics.LIVE_REQUESTS)}),
    Panel("Tasks of event loops", "short", {"{{instance}}": each(Metrics.TASKS)}),
    Panel(
        "Who is there",
        "short",
        {
            "leaders": gauge(Metrics.LEADING),
            "workers": gauge(Metrics.WORKERS, over="max"),
            "connected to the leader": gauge(Metrics.CONNECTED_WORKERS),
            "routers with a leader": gauge(Metrics.HAS_LEADER),
        },
    ),
    Panel(
        "Overload",
        "short",
        {
            "level": gauge(Metrics.OVERLOAD_LEVEL, over="max"),
            "tenants with a level": gauge(Metrics.OVERLOAD_TENANTS),
        },
    ),
    Panel(
        "Given up under overload",
        "reqps",
        {"{{class}} {{stage}}": rate(Metrics.OVERLOAD_GIVEN_UP, _CLASS, Attribute.STAGE)},
    ),
    Panel("Noisy neighbours", "short", {"{{kind}}": gauge(Metrics.NOISY_NEIGHBOURS, Attribute.KIND)}),
    Panel("Answers that another worker went on with", "reqps", {"{{class}}": rate(Metrics.RESUMES, _CLASS)}),
    Panel("Their pause", "s", _quantiles(Metrics.RESUME_PAUSE, _CLASS)),
    Panel(
        "What is refused for its failures",
        "short",
        {
            "circuits {{kind}}": gauge(Metrics.CIRCUITS, Attribute.KIND),
            "prompts": gauge(Metrics.QUARANTINED_PROMPTS),
        },
    ),
    Panel(
        "Usage ledger: not sent yet",
        "bytes",
        {"logs": gauge(Metrics.LEDGER_BACKLOG)},
    ),
    Panel(
        "Workers of pools, there and wanted",
        "short",
        {
            "{{pool}} there": gauge(Metrics.POOL_WORKERS, Attribute.POOL, over="max"),
            "{{pool}} wanted": gauge(Metrics.POOL_WORKERS_WANTED, Attribute.POOL, over="max"),
        },
    ),
    Panel("Load of pools", "percentunit", {"{{pool}}": gauge(Metrics.POOL_LOAD, Attribute.POOL, over="max")}),
    Panel("Used part of etcd's quota", "percentunit", {"etcd": gauge(Metrics.ETCD_USED_PART, over="max")}),
    Panel(
        "Certificates end in",
        "s",
        {"{{instance}}": f"min by (instance) ({Metrics.CERTIFICATE_EXPIRY.series} - time())"},
    ),
)

TENANT = (
    Panel("Requests", "reqps", {"{{tenant}} {{class}}": rate(Metrics.REQUESTS, _TENANT, _CLASS, chosen=_CHOSEN)}),
    Panel(
        "How they ended",
        "reqps",
        {"{{tenant}} {{outcome}}": rate(Metrics.OUTCOMES, _TENANT, Attribute.OUTCOME, chosen=_CHOSEN)},
    ),
    Panel(
        "Refused before the queue",
        "reqps",
        {"{{tenant}} {{reason}}": rate(Metrics.REJECTIONS, _TENANT, Attribute.REASON, chosen=_CHOSEN)},
    ),
    Panel(
        "Tokens a second",
        "short",
        {
            "{{tenant}} prompt": rate(Metrics.PROMPT_TOKENS, _TENANT, chosen=_CHOSEN),
            "{{tenant}} completion": rate(Metrics.COMPLETION_TOKENS, _TENANT, chosen=_CHOSEN),
        },
    ),
    Panel("Time to the first token", "s", _quantiles(Metrics.TTFT, _TENANT, _CLASS, chosen=_CHOSEN)),
    Panel("Time in the queue", "s", _quantiles(Metrics.QUEUE_WAIT, _TENANT, _CLASS, chosen=_CHOSEN)),
    Panel("Time for each token", "s", _quantiles(Metrics.TPOT, _TENANT, _CLASS, chosen=_CHOSEN)),
    Panel("Between tokens of a stream", "s", _quantiles(Metrics.INTER_TOKEN, _TENANT, chosen=_CHOSEN)),
    Panel("KV in use", "bytes", {"{{tenant}}": gauge(Metrics.KV_IN_USE, _TENANT, chosen=_CHOSEN)}),
    Panel(
        "Set back",
        "ops",
        {
            "{{tenant}} preempted": rate(Metrics.TENANT_PREEMPTIONS, _TENANT, chosen=_CHOSEN),
            "{{tenant}} evicted": rate(Metrics.KV_TENANT_EVICTIONS, _TENANT, chosen=_CHOSEN),
        },
    ),
    Panel("What is left of the error budget, an hour", "percentunit", {"{{tenant}} {{class}}": _budget_left("1h")}),
    Panel(
        "First tokens against their target",
        "reqps",
        {
            "{{tenant}} {{class}} {{verdict}}": rate(
                Metrics.SLO_FIRST_TOKENS, _TENANT, _CLASS, Attribute.VERDICT, chosen=_CHOSEN
            )
        },
    ),
)

WORKER = (
    Panel("Used slots", "percentunit", {"{{instance}}": each(Metrics.SLOTS_USED)}),
    Panel(
        "Sequences",
        "short",
        {"{{instance}} run": each(Metrics.VLLM_RUNNING), "{{instance}} wait": each(Metrics.VLLM_WAITING)},
    ),
    Panel("Used KV", "percentunit", {"{{instance}}": each(Metrics.VLLM_KV_USAGE)}),
    Panel("Steps", "ops", {"{{instance}}": each(Metrics.STEPS)}),
    Panel(
        "Tokens a second",
        "short",
        {
            "{{instance}} prompt": each(Metrics.VLLM_PROMPT_TOKENS),
            "{{instance}} drawn": each(Metrics.VLLM_GENERATION_TOKENS),
        },
    ),
    Panel(
        "Found part of prompts",
        "percentunit",
        {"prefix cache": f"{rate(Metrics.VLLM_PREFIX_HITS)} / {rate(Metrics.VLLM_PREFIX_QUERIES)}"},
    ),
    Panel("Time to the first token, on the worker", "s", _quantiles(Metrics.VLLM_TTFT)),
    Panel("Prefill", "s", _quantiles(Metrics.VLLM_PREFILL)),
    Panel("Decode", "s", _quantiles(Metrics.VLLM_DECODE)),
    Panel(
        "Set back",
        "ops",
        {"{{instance}} preempted": each(Metrics.PREEMPTIONS), "{{instance}} evicted": each(Metrics.KV_EVICTIONS)},
    ),
    Panel("Sequences swapped", "ops", {"{{direction}}": rate(Metrics.KV_SWAPS, Attribute.DIRECTION)}),
    Panel("KV copied", "Bps", {"{{direction}}": rate(Metrics.KV_SWAPPED_BYTES, Attribute.DIRECTION)}),
)

ADAPTERS = (
    Panel("Where an adapter was when it was asked for", "reqps", {"{{tier}}": rate(Metrics.ADAPTER_REQUESTS, _TIER)}),
    Panel(
        "Part that was on the device",
        "percentunit",
        {
            "{{tenant}}": f"{rate(Metrics.ADAPTER_HITS, _TENANT)} / on (tenant) "
            f"{rate(Metrics.ADAPTER_REQUESTS, _TENANT)}"
        },
    ),
    Panel(
        "Hits of the most used",
        "reqps",
        {"{{tenant}} {{adapter}}": f"topk(20, {rate(Metrics.ADAPTER_HITS, _TENANT, Attribute.ADAPTER_ID)})"},
    ),
    Panel("Loads", "ops", {"{{tier}}": rate(Metrics.ADAPTER_LOADS, _TIER)}),
    Panel("Wait for an adapter", "s", _quantiles(Metrics.COLD_STARTS, _TIER)),
    Panel("On a tier now", "short", {"{{tier}}": gauge(Metrics.ADAPTERS_RESIDENT, _TIER)}),
    Panel("Left a device", "ops", {"{{kind}}": rate(Metrics.ADAPTER_EVICTIONS, Attribute.KIND)}),
    Panel("Pins that are not met", "short", {"pins": gauge(Metrics.UNMET_PINS)}),
    Panel(
        "Rollouts decided",
        "ops",
        {"{{kind}} {{reason}}": rate(Metrics.ROLLOUT_DECISIONS, Attribute.KIND, Attribute.REASON)},
    ),
    Panel(
        "Requests of rollouts, by how they ended",
        "reqps",
        {f"{_VERSIONS} {{{{outcome}}}}": rate(Metrics.ROLLOUT_REQUESTS, *_VERSION, Attribute.OUTCOME)},
    ),
    Panel("Time to the first token of rollouts", "s", _quantiles(Metrics.ROLLOUT_TTFT, *_VERSION)),
    Panel("Callers' scores", "percentunit", {_VERSIONS: _mean(Metrics.FEEDBACK, *_VERSION)}),
    Panel(
        "As gateways see them",
        "short",
        {
            "{{instance}} {{running_lora_adapters}}": "count by (instance, "
            f"{labels_of(Metrics.VLLM_LORA_INFO, [Attribute.RUNNING_ADAPTERS])}) ({Metrics.VLLM_LORA_INFO.series})"
        },
    ),
)
ALL_BOARDS = {"cluster": CLUSTER, "tenant": TENANT, "worker": WORKER, "adapters": ADAPTERS}


def board(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    chooser = {
        "name": "tenant",
        "type": "query",
        "datasource": source,
        "query": f"label_values({Metrics.REQUESTS.series}, {LABELS[_TENANT]})",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "uid": f"manylora-{name}",
        "title": f"manylora: {name}",
        "tags": ["manylora"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": True,
        "templating": {"list": [chooser] if name == "tenant" else []},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel, source: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _burns(metric: Metric, verdict: str, spare: str, long: str, short: str, times: float) -> str:
    flow = labels_of(metric, (_TENANT, _CLASS))

    def part(window: str) -> str:
        bad = f'sum by ({flow}) (rate({metric.series}{{verdict="{verdict}"}}[{window}]))'
        return f"{bad} / {rate(metric, _TENANT, _CLASS, window=window)}"

    return f"({part(long)}) > {times} * {spare} and ({part(short)}) > {times} * {spare}"


def _some(metric: Metric, which: str, by: str, window: str = "15m") -> str:
    """A series' first count makes it, so `increase` does not see that one."""
    named, series = labels_of(metric, [by]), f"{metric.series}{{{which}}}"
    is_new = f"(sum by ({named}) ({series}) unless sum by ({named}) ({series} offset {window})) > 0"
    return f"{is_new} or sum by ({named}) (increase({series}[{window}])) > 0"


def _rule(name: str, expr: str, severity: str, summary: str, wait: str = "0s") -> dict[str, Any]:
    return {
        "alert": f"Manylora{name}",
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


def rules() -> dict[str, Any]:
    spare = f"(1 - max by (tenant, class) ({Metrics.SLO_AVAILABILITY_TARGET.series}))"
    whose = "{{ $labels.tenant }}, class {{ $labels.class }}"
    loads = f'sum(rate({Metrics.ADAPTER_LOADS.series}{{tier="device"}}[5m]))'
    budget, late = Metrics.SLO_REQUESTS, Metrics.SLO_FIRST_TOKENS
    return {
        "groups": [
            {
                "name": "manylora-service-levels",
                "rules": [
                    _rule(
                        "BudgetBurnsFast",
                        _burns(budget, "bad", spare, "1h", "5m", 14.4),
                        "page",
                        f"The error budget of {whose} would last two days",
                        "2m",
                    ),
                    _rule(
                        "BudgetBurns",
                        _burns(budget, "bad", spare, "6h", "30m", 6),
                        "ticket",
                        f"The error budget of {whose} would last five days",
                        "15m",
                    ),
                    _rule(
                        "FirstTokensLate",
                        _burns(late, "late", "0.05", "1h", "5m", 2),
                        "ticket",
                        f"One in ten first tokens of {whose} is later than its target for the 95th of 100",
                        "5m",
                    ),
                ],
            },
            {
                "name": "manylora-cluster",
                "rules": [
                    _rule(
                        "NoLeader",
                        f"(sum({Metrics.LEADING.series}) or vector(0)) < 1",
                        "page",
                        "No scheduler leads: nothing is dispatched",
                        "30s",
                    ),
                    _rule(
                        "RouterWithoutLeader",
                        f"{Metrics.HAS_LEADER.series} == 0",
                        "page",
                        "Router {{ $labels.instance }} does not reach the leader",
                        "1m",
                    ),
                    _rule(
                        "WorkerLost",
                        f"max({Metrics.WORKERS.series}) < max(max_over_time({Metrics.WORKERS.series}[15m]))",
                        "ticket",
                        "A worker went in the last 15 minutes and has not come back",
                        "1m",
                    ),
                    _rule(
                        "WorkerKeptOut",
                        f"max by ({labels_of(Metrics.KEPT_OUT_WORKERS, [Attribute.POOL])}) "
                        f"({Metrics.KEPT_OUT_WORKERS.series}) > 0",
                        "ticket",
                        "A worker computes another model than its pool {{ $labels.pool }}, and is kept out",
                        "1m",
                    ),
                    _rule(
                        "NotScraped",
                        'up{job="manylora"} == 0',
                        "ticket",
                        "{{ $labels.instance }} does not answer at /metrics",
                        "1m",
                    ),
                    _rule(
                        "Overloaded",
                        f"max({Metrics.OVERLOAD_LEVEL.series}) > 0",
                        "ticket",
                        "Requests are given up for lack of capacity",
                        "10m",
                    ),
                    _rule(
                        "PoolTooSmall",
                        f"{gauge(Metrics.POOL_WORKERS_WANTED, Attribute.POOL, over='max')} > "
                        f"{gauge(Metrics.POOL_WORKERS, Attribute.POOL, over='max')}",
                        "ticket",
                        "Pool {{ $labels.pool }} has fewer workers than what is asked of it needs",
                        "10m",
                    ),
                    _rule(
                        "CircuitsOpen",
                        f'sum({Metrics.CIRCUITS.series}{{kind="open"}}) > 0',
                        "ticket",
                        "Requests of a tenant or adapter keep failing and are refused",
                        "5m",
                    ),
                    _rule(
                        "ResumesOften",
                        f"sum(rate({Metrics.RESUMES.series}[10m])) > 0.05 * sum(rate({Metrics.REQUESTS.series}[10m]))",
                        "ticket",
                        "More than one in twenty answers had to go on at another worker",
                        "5m",
                    ),
                    _rule(
                        "ResumesSlow",
                        f"histogram_quantile(0.95, sum by (le) (rate({Metrics.RESUME_PAUSE.series}[10m]))) > 5",
                        "ticket",
                        "Answers that go on at another worker stand still for more than five seconds",
                        "5m",
                    ),
                    _rule(
                        "RolledBack",
                        _some(Metrics.ROLLOUT_DECISIONS, 'kind="rollback"', Attribute.REASON),
                        "ticket",
                        "A rollout took its adapter's new version back: {{ $labels.reason }}",
                    ),
                    _rule(
                        "LedgerDown",
                        f"max({Metrics.LEDGER_DOWN.series}) > 0",
                        "ticket",
                        "The usage ledger takes no rows; routers keep them on their disks",
                        "5m",
                    ),
                    _rule(
                        "LedgerFull",
                        f"max({Metrics.LEDGER_FULL.series}) > 0 or "
                        f"sum(increase({Metrics.LEDGER_DROPPED.series}[5m])) > 0",
                        "page",
                        "A router's log of the usage ledger has no room: requests are refused, or not counted",
                    ),
                    _rule(
                        "CapsWithoutEffect",
                        f"max({Metrics.CAPS_WITHOUT_EFFECT.series}) > 0",
                        "ticket",
                        "A router without a price list or a ledger cannot hold quotas.monthly_spend of some tenants",
                        "5m",
                    ),
                    _rule(
                        "EtcdFillsUp",
                        f"max({Metrics.ETCD_USED_PART.series}) > 0.8",
                        "page",
                        "etcd is nearly full, and then takes no changes",
                    ),
                    _rule(
                        "CertificateEnds",
                        f"{Metrics.CERTIFICATE_EXPIRY.series} - time() < 7 * 86400",
                        "ticket",
                        "The certificate of {{ $labels.instance }} ends within a week",
                    ),
                ],
            },
            {
                "name": "manylora-memory",
                "rules": [
                    _rule(
                        "KvPressure",
                        f"sum by (instance) ({Metrics.VLLM_KV_USAGE.series}) > 0.95 and "
                        f"sum by (instance) (rate({Metrics.KV_EVICTIONS.series}[5m])) > 0",
                        "ticket",
                        "{{ $labels.instance }} evicts KV and computes it again",
                        "10m",
                    ),
                    _rule(
                        "AdapterThrash",
                        f"{loads} > 0.5 * sum(rate({Metrics.ADAPTER_REQUESTS.series}[5m])) and {loads} > 0.2",
                        "ticket",
                        "Every second request for an adapter loads one",
                        "10m",
                    ),
                    _rule(
                        "UnmetPins",
                        f"sum({Metrics.UNMET_PINS.series}) > 0",
                        "ticket",
                        "{{ $value }} pinned adapters are not on their device",
                        "5m",
                    ),
                ],
            },
        ]
    }


def files() -> dict[Path, str]:
    note = "# Written by deploy/boards.py.\n"
    alerts = note + yaml.safe_dump(rules(), sort_keys=False, width=1000)
    found = {RULES: alerts, CHART_RULES: alerts}
    for name, panels in ALL_BOARDS.items():
        found[BOARDS / f"{name}.json"] = json.dumps(board(name, panels), indent=2) + "\n"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = [p for p, text in files().items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path])
        print(f"{path.relative_to(ROOT)} {'is not current' if is_check else 'is written'}")
    return int(bool(stale) and is_check)


if __name__ == "__main__":
    sys.exit(main())
