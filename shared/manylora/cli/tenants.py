"""`manylora tenant ...`, and the cutting of a YAML file into its documents."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer
import yaml

from manylora.cli.output import EXIT_FAILED, print_json, print_table, report, usage_error, write
from manylora.client import Client, RequestFailed


@dataclass(frozen=True)
class PolicyDocument:
    """One document of a file, as it stands there, and where it begins."""

    number: int
    first_line: int
    text: str


def split_documents(text: str) -> list[PolicyDocument]:
    """The file's documents, empty ones left out. What is no YAML stays whole: the server says what is wrong with it."""
    spans: list[tuple[int, int]] = []
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.DocumentStartEvent):
                assert event.start_mark is not None
                spans.append((event.start_mark.index, event.start_mark.line))
    except yaml.YAMLError:
        return [PolicyDocument(1, 1, text)]
    ends = [index for index, _ in spans[1:]] + [len(text)]
    documents = [
        PolicyDocument(number, line + 1, text[start:end])
        for number, ((start, line), end) in enumerate(zip(spans, ends, strict=True), 1)
    ]
    return [d for d in documents if not _is_empty(d.text)]


def _is_empty(text: str) -> bool:
    """Whether a document that can be parsed has nothing in it."""
    content = [e for e in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(e, yaml.NodeEvent)]
    return not content or (len(content) == 1 and isinstance(content[0], yaml.ScalarEvent) and content[0].value == "")


async def apply_documents(client: Client, source: str, text: str) -> list[dict[str, object]]:
    """Applies all documents in order. A refusal ends it; its RequestFailed says which document of `source` it was."""
    applied: list[dict[str, object]] = []
    documents = split_documents(text)
    if not documents:
        raise RequestFailed("INVALID_ARGUMENT", f"{source}: has no policy document")
    for document in documents:
        try:
            tenant_id, version = await client.tenants.apply(document.text)
        except RequestFailed as error:
            place = f"{source}: " if len(documents) == 1 else f"{source}, document from line {document.first_line}: "
            raise _NotApplied(error, place, applied) from None
        applied.append({"tenant_id": tenant_id, "version": version})
    return applied


def read_file(file: Path) -> str:
    """The file's text, `-`: stdin's. Where it cannot be read, the command was called wrongly."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(f"{file}: cannot be read: {error}") from None


async def apply(server: str, file: Path, *, as_json: bool) -> None:
    source = "stdin" if str(file) == "-" else str(file)
    text = read_file(file)
    async with Client(server) as client:
        try:
            applied = await apply_documents(client, source, text)
        except _NotApplied as error:
            if not as_json:
                _show_applied(error.applied, as_json=False)
            report(error, as_json=as_json, others={"applied": error.applied})
            raise typer.Exit(EXIT_FAILED) from None
    _show_applied(applied, as_json=as_json)


async def get(server: str, tenant_id: str, *, as_json: bool) -> None:
    async with Client(server) as client:
        tenant = await client.tenants.get(tenant_id)
    if as_json:
        print_json(tenant)
    else:
        write(tenant.policy_yaml)


async def list_all(server: str, *, as_json: bool) -> None:
    async with Client(server) as client:
        tenants = await client.tenants.list()
    if as_json:
        print_json(
            {"tenants": [{"tenant_id": t.tenant_id, "version": t.version, "adapters": t.adapters} for t in tenants]}
        )
    else:
        rows = [(t.tenant_id, t.version, t.adapters) for t in tenants]
        print_table(("tenant", "version", "adapters"), rows, empty="there are no tenants")


async def delete(server: str, tenant_id: str, *, as_json: bool) -> None:
    async with Client(server) as client:
        removed_adapters = await client.tenants.delete(tenant_id)
    if as_json:
        print_json({"tenant_id": tenant_id, "removed_adapters": removed_adapters})
    else:
        write(f"{tenant_id}: removed, with {removed_adapters} adapters\n")


class _NotApplied(RequestFailed):
    """A refused document, and the tenants that were applied before it."""

    def __init__(self, error: RequestFailed, place: str, applied: list[dict[str, object]]) -> None:
        super().__init__(
            error.code, place + error.message, violations=error.violations, retry_after_s=error.retry_after_s
        )
        self.applied = applied


def _show_applied(applied: list[dict[str, object]], *, as_json: bool) -> None:
    if as_json:
        print_json({"applied": applied})
        return
    for tenant in applied:
        write(f"{tenant['tenant_id']}: applied, version {tenant['version']}\n")
