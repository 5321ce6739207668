"""`manylora usage ...`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.usage import groups_of, moment
from manylora_shared.ledger.usage import month as parsed_month

from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, connect, run, usage_error
from manylora.reports.usage_rows import Format

usage_app = typer.Typer(help="What requests have used, and what it costs.", invoke_without_command=True)

Tenant = Annotated[str, typer.Option("--tenant", help="The tenant; default: the key's own, or all.")]
Output = Annotated[Path | None, typer.Option("--output", dir_okay=False, help="A file, instead of stdout.")]


def parsed_moment(text: str, option: str) -> float:
    try:
        return moment(text, option) if text else 0.0
    except InvalidRequest as e:
        raise usage_error(f"--{e.message}") from None


@usage_app.callback()
def usage(
    context: typer.Context,
    tenant: Tenant = "",
    by: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Sum by tenant, adapter, version, class, key, pool, model, outcome, day, month; total: one sum; "
            "default: a row for each request.",
        ),
    ] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Requests that ended from then on: 2026-11-25.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Requests that ended before then.")] = "",
    form: Annotated[Format, typer.Option("--format", help="What is written.")] = Format.TABLE,
    output: Output = None,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Show the usage ledger: a row for each request, or sums."""
    if context.invoked_subcommand is not None:
        return
    from manylora.reports import usage_rows

    try:
        groups = groups_of(name for name in by.split(",") if name != "total")
    except InvalidRequest as e:
        raise usage_error(f"--{e.message}, total") from None
    showing = usage_rows.show(
        connect(server, key),
        tenant=tenant,
        by=groups,
        is_total=by == "total",
        since_unix_s=parsed_moment(since, "since"),
        until_unix_s=parsed_moment(until, "until"),
        form=Format.JSON if as_json else form,
        output=output,
    )
    run(showing, as_json=as_json)


@usage_app.command("report")
def usage_report(
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="Of which requests ended; in UTC.")],
    tenant: Tenant = "",
    to_csv: Annotated[
        Path | None, typer.Option("--csv", dir_okay=False, help="A line for each day, adapter, class and key.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", dir_okay=False, help="A page a tenant, to print.")] = None,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Sum up a month, tenant by tenant, with what it costs."""
    from manylora.reports import usage_report

    try:
        parsed_month(month)
    except InvalidRequest as e:
        raise usage_error(f"--{e.message}") from None
    except (ValueError, OverflowError):  # of the last month that a date can have
        raise usage_error(f"--month: {month[:40]!r} ends after the last date that there is, of 9999") from None
    run(usage_report.report(connect(server, key), month, tenant, to_csv=to_csv, html=html), as_json=False)


@usage_app.command("forward")
def usage_forward(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NATS",
            help="Where routers send rows (--ledger-via): nats:env:NAME, nats:file:PATH or nats:vault:PATH#FIELD.",
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="Where they are kept, as the routers' --ledger has it.")
    ],
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when nothing waits.")] = False,
) -> None:
    """Bring rows from JetStream to where they are kept; runs near that place, until it is told to end."""
    from manylora.reports import usage_forward

    run(usage_forward.forward(source, to, until_empty=until_empty), as_json=False)


@usage_app.command("reconcile")
def usage_reconcile(
    tenant: Tenant = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Hold the ledger's sums against what the quotas settled, to the token; for a cluster at rest."""
    from manylora.reports import usage_report

    run(usage_report.reconcile(connect(server, key), tenant, as_json=as_json), as_json=as_json)
