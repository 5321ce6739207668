"""The commands on the audit log, and their options; `audit_report` does what they say."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.cli.commands.on_cluster import on_cluster
from manylora.cli.output import Target

audit_app = typer.Typer(help="Who did what: the cluster's audit log.", no_args_is_help=True)

Work = Coroutine[Any, Any, None]


@audit_app.command()
@on_cluster
def verify(
    folder: Annotated[
        Path | None,
        typer.Argument(
            exists=True, file_okay=False, help="A router's --audit-log, or an export; default: the routers'."
        ),
    ] = None,
    public_key: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, metavar="FILE", help="Whose signatures count (audit.key.pub); may be repeated."
        ),
    ] = None,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Look whether anything was changed, removed, moved or cut off; exit code 1 where something was."""
    from manylora.reports import audit_report

    return audit_report.check(target, folder, public_key or [], as_json=as_json)


@audit_app.command()
@on_cluster
def tail(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many.")] = 20,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Show the last entries of all routers, by their time."""
    from manylora.reports import audit_report

    return audit_report.tail(target, lines, as_json=as_json)


@audit_app.command()
@on_cluster
def export(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Must be empty, or not be there.")],
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Write a copy of the log with its signed heads, which `verify FOLDER` checks without the cluster."""
    from manylora.reports import audit_report

    return audit_report.export(target, folder, as_json=as_json)
