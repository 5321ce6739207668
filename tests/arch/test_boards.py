"""The boards and rules that are committed are those of the registry, and Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import boards

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


def test_what_is_committed_is_current() -> None:
    for path, text in boards.files().items():
        assert path.read_text() == text, f"{path.name} is not current: python deploy/boards.py"
    known = {path.name for path in boards.files() if path.suffix == ".json"} | {"requests.json"}
    assert {path.name for path in boards.BOARDS.glob("*.json")} == known


@needs_promtool
def test_prometheus_takes_every_rule() -> None:
    assert PROMTOOL is not None
    found = subprocess.run([PROMTOOL, "check", "rules", boards.RULES], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    config = subprocess.run(
        [PROMTOOL, "check", "config", "--syntax-only", boards.ROOT / "deploy/prometheus.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert config.returncode == 0, config.stderr


def summary_of(name: str, labels: dict[str, str]) -> str:
    rules = {rule["alert"]: rule for group in boards.rules()["groups"] for rule in group["rules"]}
    summary = str(rules[f"Manylora{name}"]["annotations"]["summary"]).replace("{{ $value }}", "1")
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), summary)


def scene(values: dict[str, str], at: str, fires: dict[str, list[dict[str, str]]]) -> dict[str, Any]:
    """Series a minute, and with which labels each alert fires."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": each} for name, each in values.items()],
        "alert_rule_test": [
            {
                "eval_time": at,
                "alertname": f"Manylora{name}",
                "exp_alerts": [
                    {"exp_labels": each, "exp_annotations": {"summary": summary_of(name, each)}} for each in labels
                ],
            }
            for name, labels in fires.items()
        ],
    }


FLOW = 'tenant="acme",class="interactive"'
TARGET = {f"manylora_slo_availability_target{{{FLOW}}}": "0.99x180"}
ACME = {"tenant": "acme", "class": "interactive", "severity": "page"}


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    assert PROMTOOL is not None

    def requests(good: int, bad: int) -> dict[str, str]:
        name = "manylora_slo_requests_total"
        return {
            f'{name}{{{FLOW},verdict="good"}}': f"0+{good}x180",
            f'{name}{{{FLOW},verdict="bad"}}': f"0+{bad}x180",
            **TARGET,
        }

    well = {
        "scheduler_leading": "1x180",
        'workers{instance="r"}': "2x180",
        'scheduler_reachable{instance="r"}': "1x180",
    }
    scenes = [
        scene(requests(99, 1) | well, "2h", {"BudgetBurnsFast": [], "NoLeader": [], "WorkerLost": []}),
        scene(requests(80, 20) | well, "2h", {"BudgetBurnsFast": [ACME]}),
        scene({"scheduler_leading": "0x180"}, "10m", {"NoLeader": [{"severity": "page"}]}),
        scene({'workers{instance="r"}': "2x20 1x100"}, "25m", {"WorkerLost": [{"severity": "ticket"}]}),
        scene({'workers{instance="r"}': "2x20 1x100"}, "60m", {"WorkerLost": []}),
        scene(
            {"certificate_expiry_timestamp_seconds": "3600x20"},
            "5m",
            {"CertificateEnds": [{"severity": "ticket"}]},
        ),
        scene(
            {'resumes_total{class="standard"}': "0+1x30", 'inference_requests_total{class="standard"}': "0+10x30"},
            "25m",
            {"ResumesOften": [{"severity": "ticket"}], "ResumesSlow": []},
        ),
        scene(
            {
                'resume_pause_seconds_bucket{le="5"}': "0+1x30",
                'resume_pause_seconds_bucket{le="10"}': "0+9x30",
                'resume_pause_seconds_bucket{le="+Inf"}': "0+9x30",
            },
            "25m",
            {"ResumesSlow": [{"severity": "ticket"}]},
        ),
        scene(
            {'manylora_rollout_decisions_total{kind="rollback",reason="errors"}': "0x5 1x20"},
            "10m",
            {"RolledBack": [{"severity": "ticket", "reason": "errors"}]},
        ),
        scene(
            {'manylora_rollout_decisions_total{kind="rollback",reason="errors"}': "_x5 1x20"},
            "10m",
            {"RolledBack": [{"severity": "ticket", "reason": "errors"}]},
        ),
        scene(
            {'manylora_rollout_decisions_total{kind="rollback",reason="errors"}': "_x5 1x60"}, "40m", {"RolledBack": []}
        ),
        scene(
            {'manylora_rollout_decisions_total{kind="promote",reason="errors"}': "0x5 1x20"}, "10m", {"RolledBack": []}
        ),
        scene(
            {
                'manylora_pool_workers_wanted{pool="small",instance="s"}': "3x30",
                'manylora_pool_workers{pool="small",instance="s"}': "2x30",
                'manylora_pool_workers_wanted{pool="default",instance="s"}': "2x30",
                'manylora_pool_workers{pool="default",instance="s"}': "2x30",
            },
            "20m",
            {"PoolTooSmall": [{"severity": "ticket", "pool": "small"}]},
        ),
        scene({"manylora_unmet_pins": "1x20"}, "10m", {"UnmetPins": [{"severity": "ticket"}]}),
    ]
    tests = {"rule_files": [str(boards.RULES)], "evaluation_interval": "1m", "tests": scenes}
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests))
    found = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_board_has_panels_with_queries() -> None:
    for path, text in boards.files().items():
        if path.suffix == ".json":
            board = json.loads(text)
            assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])
