"""What the documents name is there: flags, commands, variables, metrics, links; and what callers meet is named."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import manylora_shared.encryption.key_service
import manylora_shared.encryption.sealing
import manylora_shared.stores.bucket  # noqa: F401  their reasons are of the same tree
import pytest
import typer
from manylora.cli.app import app
from manylora.v1 import common_pb2, inference_pb2
from manylora_router.config import RouterConfig
from manylora_router.guard.rules import ROUTES
from manylora_scheduler.config import SchedulerConfig
from manylora_shared import errors, metadata, sampling
from manylora_shared.errors import Code, Interrupted, ManyloraError, Rejected
from manylora_shared.process.config import PREFIX, flag_of
from manylora_shared.telemetry.names import Attribute, SpanName
from manylora_shared.telemetry.registry import Metric, Metrics
from manylora_worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in (
    "API", "ARCHITECTURE", "GLOSSARY", "OPERATIONS", "PLANNING", "POLICY", "RUNBOOK", "SIMULATION")))  # fmt: skip
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS}
API = TEXTS["docs/API.md"]
CONFIGS: tuple[type[Any], ...] = (RouterConfig, SchedulerConfig, WorkerConfig)
FLAGS = {"--config", *(flag_of(name) for config in CONFIGS for name in config.__dataclass_fields__)}
OTHERS_FLAGS = {  # of docker, etcd, curl, helm, Prometheus, aiperf, vLLM, and of our own scripts
    *("--build", "--build-arg", "--detach", "--profile", "--create-namespace", "--set", "--cacert", "--create-home"),
    *("--home-dir", "--now", "--auto-compaction-mode", "--auto-compaction-retention", "--quota-backend-bytes"),
    *("--prefix", "--keys-only", "--enable-feature", "--server-metrics", "--alive", "--price", "--help"),
    "--lora-modules",
}
OTHERS_VARIABLES = {"MANYLORA_USAGE"}  # a stream of NATS
OWN_VARIABLES = {"MANYLORA_KEY", "MANYLORA_SERVER"}  # of clients
OTHERS_NAMES = {"manylora_usage"}  # a table of PostgreSQL
LABEL = re.compile(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \| ([A-Z_]+) \| (\d+) `(\w+)` \|", re.MULTILINE)


def commands() -> Iterator[tuple[str, Any]]:
    def below(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
        yield " ".join(path), command
        for name, child in getattr(command, "commands", {}).items():
            yield from below((*path, name), child)

    yield from below((), typer.main.get_command(app))


COMMANDS = dict(commands())
OPTIONS = {
    option for each in COMMANDS.values() for param in each.params for option in param.opts + param.secondary_opts
}


def problem_of(typed: str) -> str:
    """Of `manylora ...`, as documents write it, with brackets around what may be left out. Empty: it can be typed."""
    words = re.findall(r"[^\s\[\]|]+", re.split(r" (?:>|&&|&) ", typed.replace("\\|", "|"))[0])[1:]
    path: list[str] = []
    while words and ((words[0].startswith("-") and not path) or " ".join([*path, words[0]]) in COMMANDS):
        if words[0].startswith("-"):  # of `manylora` itself; one value
            if words.pop(0) not in {o for param in COMMANDS[""].params for o in param.opts} | {"--help"}:
                return "an option that `manylora` has not"
            words = words[1:]
        else:
            path.append(words.pop(0))
    command = COMMANDS[" ".join(path)]
    if hasattr(command, "commands") and words and not command.invoke_without_command:
        return f"there is no command {' '.join([*path, words[0]])}"
    known = {option for param in command.params for option in param.opts + param.secondary_opts}
    return ", ".join(w for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in known)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_it_names_is_there(name: str) -> None:
    text = TEXTS[name]
    no_flag = OTHERS_FLAGS | FLAGS | OPTIONS | {f"--no-{flag[2:]}" for flag in FLAGS}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= no_flag
    variables = {PREFIX + flag[2:].upper().replace("-", "_") for flag in FLAGS}
    assert set(re.findall(r"\bMANYLORA_[A-Z_]+", text)) <= variables | OTHERS_VARIABLES | OWN_VARIABLES
    metrics = [metric for metric in vars(Metrics).values() if isinstance(metric, Metric)]
    known = {named for metric in metrics for named in (metric.name, metric.series, metric.otlp)} | OTHERS_NAMES
    known |= {str(value) for names in (SpanName, Attribute) for value in vars(names).values()}
    for found in re.findall(r"`((?:manylora_|vllm:)\w+|manylora(?:\.\w+)+)`", text):
        assert found in known or is_module(found), found
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text)) <= targets
    typed = re.findall(r"`(manylora [^`\n]+)`", text) + re.findall(
        r"^\$ .*?\b(manylora [a-z][^\n#|]+)", text, re.MULTILINE
    )
    assert {each: problem_of(each) for each in typed if problem_of(each)} == {}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_what_is_not_there_would_be_found() -> None:
    for typed in ("manylora adapter added N", "manylora status --all", "manylora --address A status"):
        assert problem_of(typed), typed


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    paths = [ROOT / name for name in DOCUMENTS] + sorted((ROOT / "docs/decisions").glob("*.md"))
    lost = []
    for path in paths:
        for target in re.findall(r"\]\(([^)\s:]+)\)", path.read_text()):
            file, _, anchor = target.partition("#")
            to = path.parent / file if file else path
            if not to.exists() or (anchor and anchor not in anchors(to)):
                lost.append(f"{path.name}: {target}")
    assert lost == []


def reasons(kind: type[ManyloraError]) -> Iterator[type[ManyloraError]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("manylora"):
            yield each
            yield from reasons(each)


def test_each_reason_is_in_the_table_as_callers_meet_it() -> None:
    told = {
        label: (code, int(status), kind)
        for labels, code, status, kind in LABEL.findall(API)
        for label in re.findall(r"[A-Z_]+", labels)
    }
    met = {}
    named = [kind for kind in {*reasons(Rejected), *reasons(Interrupted)} if "label" in vars(kind)]
    for kind in named:  # what is below one and takes its name over may have another status
        http = kind.own_http or errors.HTTP_OF_CODE[kind.code]
        met[kind.label.upper()] = (Code(kind.code).name, http.status, http.type)
    assert told == met


def test_each_field_header_and_route_is_named() -> None:
    named = set(re.findall(r"`([^`\n]+)`", API)) | set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`\n]+)`", API))))
    fields = [
        f.name
        for message in (inference_pb2.GenerateRequest, common_pb2.SamplingParams)
        for f in message.DESCRIPTOR.fields
    ]
    assert {*fields, *(parameter.name for parameter in sampling.PARAMETERS)} - named == set()
    headers = {value for name, value in vars(metadata).items() if name.endswith("_KEY") and isinstance(value, str)}
    assert {each for each in headers if each not in API} <= {metadata.PEER_KEY, metadata.CALLER_KEY}  # between services
    paths = {route.partition(" ")[2] for route in ROUTES if not route.partition(" ")[2].startswith("/console")}
    assert {path for path in paths if path not in API} == set()


def test_each_command_is_in_the_reference() -> None:
    table = API.partition("## The command line")[2]
    for name in filter(None, COMMANDS):
        words = name.split()
        ends = [f"`{' '.join(words[i:])}" for i in range(len(words))]
        assert any(end in table for end in [f"manylora {name}", *ends]), name


def test_who_asks_no_router_is_told() -> None:
    """The last sentence of the reference of the command line says which commands lack --server, and --json."""
    table = API.partition("## The command line")[2]
    _, without_server, without_json, _ = re.split(r"All but|take `--server`|`--json`", table)[-4:]
    leaves = {
        name: {o for param in each.params for o in param.opts}
        for name, each in COMMANDS.items()
        if not hasattr(each, "commands")
    }
    told = set(re.findall(r"`([a-z ]+)`", without_server))
    assert told == {"certs" if name == "certs init" else name for name, has in leaves.items() if "--server" not in has}
    told_json = set(re.findall(r"`([a-z ]+)`", without_json))
    assert told_json == {name for name, has in leaves.items() if "--server" in has and "--json" not in has}
