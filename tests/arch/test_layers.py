"""The layers of the code, as pyproject.toml's import contracts and these tests state them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [ROOT / "shared", ROOT / "services"]

TORCH_BLOCKED = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        importlib.import_module(found.name)
print("ok")
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_import_contracts_hold() -> None:
    result = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_contracts_name_modules_that_exist() -> None:
    """import-linter refuses unknown source modules, but not forbidden ones that are ours and misspelt."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    known = {name_of(path) for root in SOURCE for path in root.rglob("*.py")}
    for contract in contracts:
        for name in contract.get("forbidden_modules", []):
            if name.startswith("manylora"):
                assert name in known, f"{contract['id']}: {name}"


@pytest.mark.parametrize(
    ("packages", "blocked"),
    [
        (["manylora_router", "manylora_shared", "manylora.client"], ["torch", "peft", "accelerate", "bitsandbytes"]),
        (
            ["manylora_scheduler"],
            ["torch", "peft", "accelerate", "bitsandbytes", "transformers", "tokenizers", "numpy"],
        ),
    ],
    ids=["router", "scheduler"],
)
def test_slim_images_import_without_the_torch_stack(packages: list[str], blocked: list[str]) -> None:
    result = run(sys.executable, "-c", TORCH_BLOCKED.format(packages=packages, blocked=blocked))
    assert result.stdout.strip() == "ok", result.stdout + result.stderr


def test_only_config_reads_the_environment() -> None:
    readers = {str(path.relative_to(ROOT)) for path in python_files() if reads_environment(path)}
    assert readers <= {"shared/manylora_shared/process/config.py"}, readers


def test_only_the_wall_clock_module_and_telemetry_read_the_time() -> None:
    """All else takes `now`, or the event loop's time, so that the simulation can own it."""
    allowed = {"shared/manylora_shared/process/clock.py", "shared/manylora_shared/telemetry/source.py"}
    simulated = [
        path
        for path in python_files()
        if path.is_relative_to(ROOT / "shared/manylora_shared") or path.is_relative_to(ROOT / "services")
    ]
    readers = {str(path.relative_to(ROOT)) for path in simulated if calls_wall_clock(path)}
    assert readers <= allowed, readers - allowed


DISTRIBUTIONS = {
    "google": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jwt": "pyjwt",
    "huggingface_hub": "huggingface-hub",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "nats": "nats-py",
    "yaml": "pyyaml",
}
"""Where the name to import is not the name to install."""
OWN_EXTRAS = {
    "services/worker/manylora_worker/models/cuda/kernels": "cuda",
    "shared/manylora/load": "load",
    "shared/manylora_shared/encryption/aws_kms.py": "aws",
    "shared/manylora_shared/ledger_sinks/jetstream.py": "nats",
    "shared/manylora_shared/ledger_sinks/postgres.py": "postgresql",
    "shared/manylora_shared/parquet": "parquet",
}
"""What the package around them does without: Triton on a worker without a GPU, an HTTP client beside the command,
AWS's client, what sinks of the ledger need."""


@pytest.mark.parametrize(
    ("folder", "extra"),
    [
        ("shared/manylora", None),
        ("shared/manylora_shared", None),
        ("services/router", "router"),
        ("services/scheduler", "scheduler"),
        ("services/worker", "worker"),
        *OWN_EXTRAS.items(),
    ],
)
def test_what_is_imported_is_declared(folder: str, extra: str | None) -> None:
    """An image has what its own extra names; that something else brings it today is luck."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + (extras[extra] if extra else [])
    if extra == "cuda":
        declared += extras["worker"]
    names = {re.split(r"[<>=!~ \[;]", line, maxsplit=1)[0].lower() for line in declared}
    for path in python_files():
        inner = next((each for each in OWN_EXTRAS if path.is_relative_to(ROOT / each)), folder)
        if not path.is_relative_to(ROOT / folder) or inner != folder:
            continue
        for module in third_party_imports(path):
            assert DISTRIBUTIONS.get(module, module) in names, f"{path.relative_to(ROOT)} imports {module}"


def third_party_imports(path: Path) -> set[str]:
    tops: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            tops.add(node.module.partition(".")[0])
    return {top for top in tops if top not in sys.stdlib_module_names and not top.startswith("manylora")}


def python_files() -> list[Path]:
    return sorted(path for root in SOURCE for path in root.rglob("*.py") if "_pb2" not in path.name)


def name_of(path: Path) -> str:
    """The dotted name of a module of ours."""
    parts = path.with_suffix("").relative_to(ROOT).parts
    start = next(i for i, part in enumerate(parts) if part.startswith("manylora"))
    return ".".join(parts[start:]).removesuffix(".__init__")


def reads_environment(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
    }
    return bool((attributes | imported) & {"environ", "environb", "getenv", "getenvb", "putenv"})


def calls_wall_clock(path: Path) -> bool:
    """Whether it calls time.time() or time.time_ns(); perf_counter and monotonic measure, and decide nothing."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        and node.attr in {"time", "time_ns"}
        for node in ast.walk(ast.parse(path.read_text()))
    )
