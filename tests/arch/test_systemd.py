"""The units for machines without Kubernetes, read by systemd itself, and their settings by the services."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manylora_router.config import RouterConfig
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.process.config import parse
from manylora_worker.config import WorkerConfig

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
KINDS: dict[str, type[Any]] = {"router": RouterConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
ANALYZE = shutil.which("systemd-analyze")


def unit_of(service: str) -> Path:
    (path,) = UNITS.glob(f"manylora-{service}*.service")
    return path


@pytest.mark.parametrize("service", KINDS)
def test_a_units_settings_are_the_services_and_it_has_time_to_end(service: str) -> None:
    unit = unit_of(service).read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert f" -m manylora_{service} " in command
    named = command.partition("--config /etc/manylora/")[2].replace("%i", "0")
    config = parse(KINDS[service], ["--config", str(UNITS / named)], {})
    assert config.tls_files is not None
    assert config.advertise.rpartition(":")[2] == config.listen.rpartition(":")[2]
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > getattr(config, "drain_s", 1) + 10


def test_services_of_one_machine_use_different_ports() -> None:
    found = [parse(KINDS[path.stem.partition("-")[0]], ["--config", str(path)], {}) for path in UNITS.glob("*.yaml")]
    ports = [address.rpartition(":")[2] for each in found for address in (each.listen, each.metrics_listen)]
    assert len(ports) == len(set(ports)) == 2 * len(KINDS)


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
@pytest.mark.parametrize("service", KINDS)
def test_systemd_takes_the_unit(service: str, tmp_path: Path) -> None:
    assert ANALYZE is not None
    path = unit_of(service)
    copy = tmp_path / path.name.replace("@", "@0")
    copy.write_text(path.read_text().replace("/opt/manylora/.venv/bin/python", sys.executable))
    found = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--generators=no", copy], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    found = subprocess.run([ANALYZE, "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    assert "TimeoutStopSecs" in found.stderr, "it reads the file that it is given"
