"""`manylora tenant ...`, and the cutting of a YAML file into its documents."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
import yaml
from manylora_shared.errors import InvalidRequest
from manylora_shared.tenancy.policy import parse_policy

from manylora.cli.files import name_of, read_file
from manylora.cli.output import EXIT_FAILED, Target, print_json, print_table, report, say, usage_error, write
from manylora.client import Client, FieldViolation, PolicyChange, RequestFailed

_LINE = re.compile(r"^line ([0-9]+):")


@dataclass(frozen=True)
class PolicyDocument:
    """As it stands in the file, and where it begins."""

    first_line: int
    text: str


def split_documents(text: str) -> list[PolicyDocument]:
    """Without empty ones. What is no YAML stays whole: the server says what is wrong with it."""
    spans: list[tuple[int, int]] = []
    contents: list[list[yaml.NodeEvent]] = []
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.DocumentStartEvent):
                assert event.start_mark is not None
                spans.append((event.start_mark.index, event.start_mark.line))
                contents.append([])
            elif isinstance(event, yaml.NodeEvent):
                contents[-1].append(event)
    except (yaml.YAMLError, ValueError, OverflowError):  # the latter of escapes and numbers that are none
        return [PolicyDocument(1, text)]
    ends = [index for index, _ in spans[1:]] + [len(text)] * bool(spans)
    return [
        PolicyDocument(line + 1, text[start:end])
        for (start, line), end, content in zip(spans, ends, contents, strict=True)
        if not _is_empty(content)
    ]


def _is_empty(content: Sequence[yaml.NodeEvent]) -> bool:
    return not content or (len(content) == 1 and isinstance(content[0], yaml.ScalarEvent) and content[0].value == "")


async def apply_documents(
    client: Client, source: str, text: str, expected_version: int | None = None
) -> list[dict[str, object]]:
    """In order. A refusal ends it; its RequestFailed says at which lines of `source`."""
    applied: list[dict[str, object]] = []
    documents = _documents(source, text)
    for document in documents:
        try:
            tenant_id, version = await client.tenants.apply(document.text, expected_version=expected_version)
        except RequestFailed as error:
            raise _NotApplied(error, source, document, applied) from None
        applied.append({"tenant_id": tenant_id, "version": version})
    return applied


def check_documents(source: str, text: str) -> None:
    """What can be known to be wrong without a server; raises as `apply_documents` would."""
    for document in _documents(source, text):
        try:
            parse_policy(document.text)
        except InvalidRequest as error:
            refused = RequestFailed(
                error.code.name, error.message, reason=error.label.upper(), violations=error.violations
            )
            raise _NotApplied(refused, source, document, []) from None


def _documents(source: str, text: str) -> list[PolicyDocument]:
    documents = split_documents(text)
    if not documents:
        raise RequestFailed("INVALID_ARGUMENT", f"{source}: has no policy document")
    return documents


async def apply(target: Target, file: Path, expected_version: int | None, *, as_json: bool) -> None:
    source = name_of(file)
    text = read_file(file)
    if expected_version is not None and len(split_documents(text)) > 1:
        raise usage_error("--expect-version is for a file of one document")
    async with target.client() as client:
        try:
            applied = await apply_documents(client, source, text, expected_version)
        except _NotApplied as error:
            if not as_json:
                _show_applied(error.applied, as_json=False)
            report(error, as_json=as_json, others={"applied": error.applied})
            raise typer.Exit(EXIT_FAILED) from None
    _show_applied(applied, as_json=as_json)


async def diff(target: Target, file: Path, *, as_json: bool) -> None:
    source = name_of(file)
    documents = _documents(source, read_file(file))
    changes: list[PolicyChange] = []
    async with target.client() as client:
        for document in documents:
            try:
                changes.append(await client.tenants.diff(document.text))
            except RequestFailed as error:
                raise _NotApplied(error, source, document, []) from None
    if as_json:
        print_json({"changes": [_change(change) for change in changes]})
        return
    for change in changes:
        if change.is_empty:
            say(f"{change.tenant_id}: no change, version {change.version}")
        else:
            write("".join(_diff_lines(change)))


def _change(change: PolicyChange) -> dict[str, object]:
    return {
        "tenant_id": change.tenant_id,
        "version": change.version,
        "changed": not change.is_empty,
        "diff": "".join(_diff_lines(change)),
    }


def _diff_lines(change: PolicyChange) -> list[str]:
    before = f"{change.tenant_id} (version {change.version})" if change.version else "/dev/null"
    return list(
        difflib.unified_diff(
            change.previous_policy_yaml.splitlines(keepends=True),
            change.policy_yaml.splitlines(keepends=True),
            before,
            f"{change.tenant_id} (as it would be)",
        )
    )


async def get(target: Target, tenant_id: str, *, as_json: bool) -> None:
    async with target.client() as client:
        tenant = await client.tenants.get(tenant_id)
    if as_json:
        print_json(tenant)
    else:
        write(tenant.policy_yaml)
        if tenant.problem:
            say(f"this policy is not in force: {tenant.problem}")


async def list_all(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        tenants = await client.tenants.list()
    if as_json:
        shown = ("tenant_id", "version", "adapters", "problem")
        print_json({"tenants": [{name: getattr(tenant, name) for name in shown} for tenant in tenants]})
    else:
        rows = [(t.tenant_id, t.version, t.adapters) for t in tenants]
        print_table(("tenant", "version", "adapters"), rows, empty="there are no tenants")
        for tenant in tenants:
            if tenant.problem:
                say(f"the stored policy of {tenant.tenant_id} is not in force: {tenant.problem}")


def confirm_delete(tenant_id: str) -> None:
    """Who does not say yes has called it wrongly, also where there is nobody to ask."""
    say(f"Remove {tenant_id} with its policy, adapters and keys? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise usage_error(f"{tenant_id} is not removed; --yes does it without asking")


async def delete(target: Target, tenant_id: str, *, as_json: bool) -> None:
    async with target.client() as client:
        removed_adapters = await client.tenants.delete(tenant_id)
    if as_json:
        print_json({"tenant_id": tenant_id, "removed_adapters": removed_adapters})
    else:
        write(f"{tenant_id}: removed, with {removed_adapters} adapters\n")


async def lift_quarantine(target: Target, tenant_id: str, *, as_json: bool) -> None:
    """Fails where a router did not answer: it refuses them still."""
    async with target.client() as client:
        lifted = await client.tenants.lift_quarantine(tenant_id)
    if as_json:
        print_json({"tenant_id": tenant_id, **dataclasses.asdict(lifted)})
    else:
        write(f"{tenant_id}: {lifted.prompts} prompts out of quarantine\n")
    if lifted.missed_router_ids:
        say(f"not at {', '.join(lifted.missed_router_ids)}, which did not answer")
        raise typer.Exit(EXIT_FAILED)


class _NotApplied(RequestFailed):
    """A refused document, and the tenants applied before it. Lines are those of the whole source."""

    def __init__(
        self, error: RequestFailed, source: str, document: PolicyDocument, applied: list[dict[str, object]]
    ) -> None:
        violations = [
            FieldViolation(v.field, _line_in_source(v.description, document.first_line)) for v in error.violations
        ]
        place, message = source, error.message
        if len(violations) == 1:
            message = f"{violations[0].field}: {violations[0].description}"
        elif violations:
            message = f"{len(violations)} errors"
        elif document.first_line > 1:  # no mistake in it: another version, no server
            place = f"{source}, document from line {document.first_line}"
        super().__init__(
            error.code,
            f"{place}: {message}",
            reason=error.reason,
            violations=violations,
            retry_after_s=error.retry_after_s,
        )
        self.applied = applied


def _line_in_source(description: str, first_line: int) -> str:
    """A document is sent, and counted, from its own first line."""
    return _LINE.sub(lambda found: f"line {int(found[1]) + first_line - 1}:", description, count=1)


def _show_applied(applied: list[dict[str, object]], *, as_json: bool) -> None:
    if as_json:
        print_json({"applied": applied})
        return
    for tenant in applied:
        write(f"{tenant['tenant_id']}: applied, version {tenant['version']}\n")
