"""The runbook has a section for each alert and each fault of the chaos table, and what it tells to type is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from manylora.cli.app import app
from manylora_router.config import RouterConfig
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.process.config import flag_of
from manylora_shared.telemetry.registry import Metric, Metrics
from manylora_worker.config import WorkerConfig

from bench.chaos.faults import FAULTS
from deploy import boards

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/RUNBOOK.md").read_text()
SPANS = re.findall(r"`([^`\n]+)`", TEXT)
ETCD_FLAGS = {"--auto-compaction-mode", "--auto-compaction-retention"}
OTHERS = {"etcdctl", "systemctl", "kubectl", "docker-compose", "journalctl", "curl", "helm", "chronyc", "python"}


def sections(part: str) -> list[str]:
    return re.findall(r"^### (.+)$", TEXT.partition(f"\n## {part}\n")[2].partition("\n## ")[0], re.MULTILINE)


def test_each_alert_has_its_section() -> None:
    alerts = [rule["alert"] for group in boards.rules()["groups"] for rule in group["rules"]]
    assert sorted(sections("Alerts")) == sorted(alerts)


def test_each_fault_has_its_section() -> None:
    assert sections("Faults") == [fault.name for fault in FAULTS if not fault.name.startswith("nothing")]


def resolve(words: list[str]) -> None:
    """Raises AssertionError: there is no such command, or it has no such option."""
    command: Any = typer.main.get_command(app)  # of typer's own copy of click
    rest = list(words)
    while hasattr(command, "commands"):
        if command.invoke_without_command and (not rest or rest[0].startswith("-")):
            break
        assert rest, f"{' '.join(words)}: a command is missing"
        command = command.commands.get(rest.pop(0))
        assert command is not None, f"manylora {' '.join(words)}: there is no such command"
    known = {option for parameter in command.params for option in parameter.opts}
    for word in rest:
        assert not word.startswith("-") or word in known, f"manylora {' '.join(words)}: {word}"
    arguments = [each for each in rest if not each.startswith("-")]
    wanted = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    assert arguments or not any(parameter.required for parameter in wanted), words


def commands() -> list[str]:
    return sorted({span for span in SPANS if span.startswith("manylora ")})


@pytest.mark.parametrize("typed", commands())
def test_each_command_is_there(typed: str) -> None:
    resolve(typed.split()[1:])


def test_what_is_not_there_would_be_found() -> None:
    assert len(commands()) > 10
    for typed in ("caches drop W", "cache drop W --all", "cache", "adapter verified N"):
        with pytest.raises(AssertionError):
            resolve(typed.split())


def test_each_other_command_and_setting_is_known() -> None:
    configs: tuple[type[Any], ...] = (RouterConfig, SchedulerConfig, WorkerConfig)
    flags = {flag_of(name) for config in configs for name in config.__dataclass_fields__} | ETCD_FLAGS
    for span in SPANS:
        first = span.split()[0]
        if first.startswith("--"):
            assert first.partition("=")[0] in flags | {"--alive", "--adapters", "--prefixes"}, span
        elif " " in span and re.fullmatch(r"[a-z-]+", first) and first not in ("manylora", "make", "no"):
            assert first in OTHERS or span in TEXT_OF_STATUS, span
    for module in re.findall(r"python -m ([\w.]+)", TEXT):
        assert importlib.util.find_spec(module) is not None, module


TEXT_OF_STATUS = {"scheduler  not reachable", "the engine has failed"}


def test_each_metric_is_in_the_registry() -> None:
    known = {metric.series for metric in vars(Metrics).values() if isinstance(metric, Metric)}
    known |= {metric.name for metric in vars(Metrics).values() if isinstance(metric, Metric)}
    named = {span for span in SPANS if re.fullmatch(r"[a-z]+(_[a-z]+)*_(total|seconds|ratio)", span)}
    assert named
    assert named <= known
