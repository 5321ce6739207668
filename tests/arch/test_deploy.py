"""The container files, read without an engine; tests/compose runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from manylora_shared.telemetry import Attribute, SpanName

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("router", "scheduler", "worker")
DOCKERFILES = [ROOT / "deploy/Dockerfile", ROOT / "deploy/etcd/Dockerfile"]
CLUSTER = {"etcd", "scheduler", "scheduler-standby", "router", "worker-0", "worker-1"}
OBSERVABILITY = {"otel-collector", "jaeger", "prometheus", "grafana"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def test_compose_has_the_cluster_and_the_observability_profile(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services.keys() == CLUSTER | OBSERVABILITY | {"certs"}
    assert {name for name, service in services.items() if service.get("profiles") == ["observability"]} == OBSERVABILITY
    assert "version" not in compose, "Compose v2 calls it obsolete"


def test_healthchecks_gate_the_start(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in CLUSTER:
        assert services[name]["healthcheck"]["test"][0] == "CMD"
        for needed, condition in services[name]["depends_on"].items():
            done = "service_completed_successfully" if needed == "certs" else "service_healthy"
            assert condition == {"condition": done}
    assert services["router"]["depends_on"].keys() == CLUSTER - {"router"}


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    published = {name: s.get("ports", []) for name, s in compose["services"].items()}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert {name for name in CLUSTER if published[name]} == {"router"}


def test_commands_are_settings_of_the_services(compose: dict[str, Any]) -> None:
    """Each service's own loader takes its command line and environment."""
    from manylora_router.config import RouterConfig
    from manylora_scheduler.config import SchedulerConfig
    from manylora_shared.process.config import parse
    from manylora_worker.config import WorkerConfig

    kinds: dict[str, type[Any]] = {"router": RouterConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
    for name in CLUSTER - {"etcd"}:
        service = compose["services"][name]
        env = {key: default_of(value) for key, value in service.get("environment", {}).items()}
        config = parse(kinds[name.partition("-")[0]], [default_of(word) for word in service["command"]], env)
        assert getattr(config, "device", "auto") == "auto"
        assert config.listen.startswith("0.0.0.0:")
        assert config.etcd == "etcd:2379"
        assert config.advertise == f"{name}:{config.listen.rpartition(':')[2]}"
        assert config.listen.rpartition(":")[2] in service["healthcheck"]["test"][-1]
        assert config.tls_files is not None
        assert not config.allow_plain_text
        if name == "router":
            assert any(config.operator_key_file.startswith(v.split(":")[1] + "/") for v in service["volumes"])


def test_the_certificate_names_every_service(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services["certs"]["command"]) == {f"--host={name}" for name in CLUSTER}
    assert [name for name in CLUSTER if "tls:/var/lib/manylora/tls:ro" not in services[name]["volumes"]] == []


def default_of(value: str) -> str:
    """As compose reads it with the demo's .env: `${NAME}`, or where NAME is not set `${NAME:-default}`."""
    demo = demo_env()
    return re.sub(r"\$\{([A-Z_]+):([-?])([^}]*)\}", lambda m: demo.get(m[1], m[3] if m[2] == "-" else m[0]), value)


def demo_env() -> dict[str, str]:
    lines = (ROOT / "deploy/demo.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_compose_never_guesses_the_base_model(compose: dict[str, Any]) -> None:
    """A later `up` from another shell serves the same one, or nothing."""
    words = (ROOT / "docker-compose.yml").read_text()
    for name in ("MANYLORA_MODEL", "MANYLORA_MODEL_NAME"):
        used = re.findall(rf"\$\{{{name}\b(..)", words)
        assert used
        assert set(used) == {":?"}
        assert name in demo_env()
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / demo_env()["MANYLORA_MODEL"] / "config.json").is_file()


def test_workers_on_gpus_differ_in_nothing_else() -> None:
    laid_over = yaml.safe_load((ROOT / "deploy/gpu.yml").read_text())["services"]
    assert laid_over.keys() == {"worker-0", "worker-1"}
    for service in laid_over.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (service.keys(), device["capabilities"]) == ({"deploy"}, ["gpu"])


def test_threads_of_cpu_workers_sleep_while_they_wait(compose: dict[str, Any]) -> None:
    """The worker's image says so, and nothing takes it back."""
    assert "ENV OMP_WAIT_POLICY=PASSIVE" in stages(ROOT / "deploy/Dockerfile")["worker"]
    assert (ROOT / "deploy/Dockerfile").read_text().count("ENV OMP_WAIT_POLICY") == 1
    workers = [service for name, service in compose["services"].items() if name.startswith("worker-")]
    assert all("OMP_WAIT_POLICY" not in service["environment"] for service in workers)


def test_configuration_files_that_compose_mounts_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = default_of(volume).split(":")[0]
            assert source in compose["volumes"] or (ROOT / source).exists(), source


def stages(dockerfile: Path) -> dict[str, list[str]]:
    """The lines of each stage by its name; the last one, which is the image, has none."""
    found: dict[str, list[str]] = {}
    for line in dockerfile.read_text().splitlines():
        if line.startswith("FROM "):
            lines = found.setdefault(line.partition(" AS ")[2], [])
        elif found:
            lines.append(line)
    return found


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_run_as_an_ordinary_user(dockerfile: Path) -> None:
    assert "USER 10001:10001" in stages(dockerfile)[""]
    assert "ARG BASE_IMAGE=python:3.11-slim-bookworm" in dockerfile.read_text().splitlines()


def test_one_dockerfile_makes_the_images_of_the_services(compose: dict[str, Any]) -> None:
    by_name = stages(ROOT / "deploy/Dockerfile")
    for service in SERVICES:
        assert f'ENTRYPOINT ["python", "-m", "manylora_{service}"]' in by_name[service]
    for name in CLUSTER - {"etcd"}:
        build = compose["services"][name]["build"]
        assert build["dockerfile"] == "deploy/Dockerfile"
        assert build["args"]["SERVICE"] == name.partition("-")[0]
        assert build["args"].items() >= compose["services"]["etcd"]["build"]["args"].items()


def test_the_simulation_is_in_no_wheel_and_no_image() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = {Path(package).name for package in build["targets"]["wheel"]["packages"]}
    assert wheel == {"manylora", "manylora_shared", *(f"manylora_{service}" for service in SERVICES)}
    assert "shared/manylora_sim" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("extra", SERVICES)
def test_image_requirements_follow_the_project_file(extra: str) -> None:
    printed = subprocess.run(
        [sys.executable, "deploy/requirements.py", extra], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")[:-1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed == project["dependencies"] + project["optional-dependencies"][extra]
    assert any(line.startswith("torch") for line in printed) == (extra == "worker")


def test_every_pinned_requirement_of_the_images_is_in_the_constraints() -> None:
    """What is heavy or must match is pinned: an image built tomorrow is the image built today."""
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert {"torch", "transformers", "grpcio", "protobuf", "opentelemetry-sdk"} <= pinned


def test_collector_pipelines_use_what_is_configured() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel-collector.yaml").read_text())
    connectors = set(config["connectors"])
    known = {
        "receivers": set(config["receivers"]) | connectors,
        "processors": set(config["processors"]),
        "exporters": set(config["exporters"]) | connectors,
    }
    for pipeline in config["service"]["pipelines"].values():
        for part, names in pipeline.items():
            assert set(names) <= known[part]
    dimensions = {dimension["name"] for dimension in config["connectors"]["spanmetrics"]["dimensions"]}
    assert dimensions <= {value for name, value in vars(Attribute).items() if not name.startswith("_")}


def test_the_board_of_spans_asks_for_metrics_and_labels_that_the_collector_makes() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel-collector.yaml").read_text())["connectors"]["spanmetrics"]
    labels = {"le", "service_name", "span_name", "span_kind", "status_code"}
    labels |= {dimension["name"].replace(".", "_") for dimension in config["dimensions"]}
    metrics = {"manylora_calls_total", "manylora_duration_seconds_bucket"}
    span_names = {value for name, value in vars(SpanName).items() if not name.startswith("_")}
    expressions = [
        target["expr"]
        for panel in json.loads((ROOT / "deploy/grafana/dashboards/requests.json").read_text())["panels"]
        for target in panel["targets"]
    ]
    assert expressions
    for expression in expressions:
        assert set(re.findall(r"\b(manylora_\w+)\{", expression)) <= metrics
        assert set(re.findall(r'span_name="([^"]+)"', expression)) <= span_names
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        matched = set(re.findall(r'(\w+)="', expression))
        assert grouped | matched <= labels


def test_every_containers_log_is_bounded() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    unbounded = [
        name for name, service in compose["services"].items() if "max-size" not in service["logging"]["options"]
    ]
    assert not unbounded
