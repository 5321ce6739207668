"""The commands on adapters and their versions, and their options; `adapters` and `versions` do what they say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.cli.commands.limits import MAX_PERCENT, MAX_UINT32, finite
from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, Tenant, connect, run, usage_error

if TYPE_CHECKING:  # the client is loaded by the command that runs
    from manylora.client import AdapterLine
    from manylora.client.aio import Adapters

adapter_app = typer.Typer(help="Adapters in tenants' namespaces.", no_args_is_help=True)
samples_app = typer.Typer(help="Samples that tenants' quality gates judge by.", no_args_is_help=True)
adapter_app.add_typer(samples_app, name="samples")

Rope = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help="The rotation of positions that it was trained with, as transformers' rope_parameters: "
        '\'{"rope_type": "linear", "factor": 8}\'; default: what its adapter_config.json or config.json says.',
    ),
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a page, too.")]


@adapter_app.command()
def add(
    name: Annotated[str, typer.Argument(help="Its name in the tenant's namespace.")],
    path: Annotated[
        str,
        typer.Argument(
            help="A PEFT folder; s3://BUCKET/PREFIX, https://HOST/PATH or hf://ORG/NAME[@REVISION], which a router "
            "reads; or `store:PATH` inside the cluster's adapter store."
        ),
    ],
    tenant: Tenant,
    pool: Annotated[
        str, typer.Option(help="For whose base model it is; default: the other versions', else the policy's first.")
    ] = "",
    rope: Rope = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Upload, check and register an adapter."""
    from manylora.cli import adapters

    run(adapters.add(connect(server, key), tenant, name, path, pool=pool, rope=rope, as_json=as_json), as_json=as_json)


@adapter_app.command()
def check(
    source: Annotated[str, typer.Argument(help="As of add.")],
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="Compare with this adapter's version in force.")] = "",
    samples: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt (or messages) and expected; default: the policy's.")
    ] = None,
    judge: Annotated[str, typer.Option(help="exact, contains, regex, json, json_schema or perplexity.")] = "",
    rope: Rope = "",
    html: Html = None,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Check an adapter as add does, and register nothing; exit code 1 where it would not be served."""
    from manylora.reports import adapter_reports

    checking = adapter_reports.check(
        connect(server, key),
        tenant,
        source,
        name=name,
        samples=samples,
        judge=judge,
        rope=rope,
        html=html,
        as_json=as_json,
    )
    run(checking, as_json=as_json)


@adapter_app.command()
def report(
    name: Annotated[str, typer.Argument(help="NAME or NAME@VERSION; NAME: its newest version.")],
    tenant: Tenant,
    html: Html = None,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Show what was found of a version when it was added."""
    from manylora.reports import adapter_reports

    run(adapter_reports.report(connect(server, key), tenant, name, html=html, as_json=as_json), as_json=as_json)


@adapter_app.command()
def export(
    name: Annotated[str, typer.Argument(help="NAME or NAME@VERSION; NAME: its version in force.")],
    tenant: Tenant,
    merged: Annotated[Path, typer.Option(help="The folder to write: the base model with the adapter in its weights.")],
    model: Annotated[str, typer.Option(help="The base model, as of `up`: demo, a folder, or a name on the hub.")],
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Write a version merged with its base model, on this machine."""
    from manylora.reports import adapter_reports

    exporting = adapter_reports.export(connect(server, key), tenant, name, merged=merged, model=model, as_json=as_json)
    run(exporting, as_json=as_json)


@samples_app.command("put")
def put_samples(
    name: Annotated[str, typer.Argument(help="As adapters.gate.samples of the policy names them.")],
    path: Annotated[Path, typer.Argument(help="JSON lines with prompt (or messages) and expected.")],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Keep samples, in the place of those of that name."""
    from manylora.reports import adapter_reports

    run(adapter_reports.put_samples(connect(server, key), tenant, name, path, as_json=as_json), as_json=as_json)


@samples_app.command("list")
def list_samples(tenant: Tenant, as_json: Json = False, server: Server = DEFAULT_SERVER, key: Key = None) -> None:
    """List a tenant's samples."""
    from manylora.reports import adapter_reports

    run(adapter_reports.list_samples(connect(server, key), tenant, as_json=as_json), as_json=as_json)


@samples_app.command("remove")
def remove_samples(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Remove samples; a policy that names them lets no version through then."""
    from manylora.reports import adapter_reports

    run(adapter_reports.remove_samples(connect(server, key), tenant, name, as_json=as_json), as_json=as_json)


@adapter_app.command("list")
def list_all(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """List adapters."""
    from manylora.cli import adapters

    run(adapters.list_all(connect(server, key), tenant, as_json=as_json), as_json=as_json)


@adapter_app.command()
def verify(
    name: Annotated[str, typer.Argument(help="One adapter of --tenant; without it all.")] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Compare adapters' files in the store with their digests; exit code 1 where one is damaged."""
    from manylora.cli import adapters

    run(adapters.verify(connect(server, key), tenant, name, as_json=as_json), as_json=as_json)


@adapter_app.command()
def remove(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Remove an adapter's name; requests in flight end as they would have."""
    from manylora.cli import adapters

    run(adapters.remove(connect(server, key), tenant, name, as_json=as_json), as_json=as_json)


@adapter_app.command()
def compose(
    name: Annotated[str, typer.Argument(help="What requests call it.")],
    tenant: Tenant,
    parts: Annotated[
        str, typer.Argument(metavar="[A+B:0.5]", help="Up to four adapters, with weights; without any the name goes.")
    ] = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Give several adapters with weights a name of their own, in the tenant's policy."""
    from manylora.cli import compositions

    run(compositions.compose(connect(server, key), tenant, name, parts, as_json=as_json), as_json=as_json)


@adapter_app.command()
def rollout(
    name: Annotated[str, typer.Argument()],
    to: Annotated[int, typer.Option(help="The version.", min=1, max=MAX_UINT32)],
    tenant: Tenant,
    percent: Annotated[
        int | None, typer.Option(help="Of the requests that name no version; not with --auto.", min=0, max=MAX_PERCENT)
    ] = None,
    sticky: Annotated[str, typer.Option(help="request, conversation or user: who keeps a version.")] = "request",
    auto: Annotated[
        bool, typer.Option("--auto", help="It goes on by itself, until it is promoted, or rolled back for a reason.")
    ] = False,
    steps: Annotated[str, typer.Option(metavar="1,10,50", help="Percent; after the last comes the promotion.")] = "",
    min_requests: Annotated[int, typer.Option(help="Of each version in each step; 0: 200.", min=0, max=MAX_UINT32)] = 0,
    step_hours: Annotated[
        float,
        typer.Option(help="A step that has not had as many by then is rolled back; 0: 24.", min=0, callback=finite),
    ] = 0,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Give a version to a share of the requests."""
    from manylora.client import AutoRollout

    if auto == (percent is not None):
        raise usage_error("give either --percent or --auto")
    if not auto and (steps or min_requests or step_hours):
        raise usage_error("--steps, --min-requests and --step-hours go with --auto")
    plan = AutoRollout(_percents(steps), min_requests, step_hours * 3600) if auto else None
    _run(
        server,
        key,
        name,
        lambda adapters: adapters.rollout(tenant, name, to=to, percent=percent or 0, sticky=sticky, auto=plan),
        as_json=as_json,
    )


def _percents(steps: str) -> tuple[int, ...]:
    words = [word.strip() for word in steps.split(",")] if steps else []
    if not all(word.isascii() and word.isdigit() and len(word) < 9 and int(word) <= MAX_PERCENT for word in words):
        raise usage_error(f"--steps: {steps[:60]!r} is no list of percentages, of 0 to {MAX_PERCENT}")
    return tuple(int(word) for word in words)


@adapter_app.command()
def promote(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    to: Annotated[int, typer.Option(help="Default: the rollout's, or else the newest.", min=0, max=MAX_UINT32)] = 0,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Put a version in force for all."""

    _run(server, key, name, lambda adapters: adapters.promote(tenant, name, to=to), as_json=as_json)


@adapter_app.command()
def rollback(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """End a rollout; where there is none, take the last promotion back."""

    _run(server, key, name, lambda adapters: adapters.rollback(tenant, name), as_json=as_json)


@adapter_app.command()
def retire(
    name: Annotated[str, typer.Argument()],
    number: Annotated[int, typer.Argument(help="The version.", min=1, max=MAX_UINT32)],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Take a version out that nobody gets."""

    _run(server, key, name, lambda adapters: adapters.retire(tenant, name, number), as_json=as_json)


@adapter_app.command()
def history(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Show a name's versions and what became of them."""
    from manylora.cli import versions

    run(versions.history(connect(server, key), tenant, name, as_json=as_json), as_json=as_json)


def _run(
    server: str, key: str | None, name: str, make: Callable[[Adapters], Awaitable[AdapterLine]], *, as_json: bool
) -> None:
    from manylora.cli import versions

    run(versions.change(connect(server, key), name, make, as_json=as_json), as_json=as_json)
