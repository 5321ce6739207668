"""The commands on tenants and their policies, and their options; `tenants` does what they say."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.cli.commands.limits import MAX_UINT64
from manylora.cli.commands.on_cluster import on_cluster
from manylora.cli.output import Target

tenant_app = typer.Typer(help="Tenants and their policies.", no_args_is_help=True)

PolicyFile = Annotated[Path, typer.Argument(help="YAML, one policy a document; `-` reads stdin.", allow_dash=True)]
TenantId = Annotated[str, typer.Argument(metavar="TENANT")]
Work = Coroutine[Any, Any, None]


@tenant_app.command()
@on_cluster
def apply(
    file: PolicyFile,
    expect_version: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_UINT64, help="Only if the tenant is at this version; 0: only if there is no such tenant."
        ),
    ] = None,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Create or replace tenants from policy documents, in their order; stops at the first that is refused."""
    from manylora.cli import tenants

    return tenants.apply(target, file, expect_version, as_json=as_json)


@tenant_app.command()
@on_cluster
def diff(file: PolicyFile, *, target: Target, as_json: bool) -> Work:
    """Show what `apply` would change, and change nothing."""
    from manylora.cli import tenants

    return tenants.diff(target, file, as_json=as_json)


@tenant_app.command()
@on_cluster
def get(tenant_id: TenantId, *, target: Target, as_json: bool) -> Work:
    """Print a tenant's policy."""
    from manylora.cli import tenants

    return tenants.get(target, tenant_id, as_json=as_json)


@tenant_app.command("list")
@on_cluster
def list_all(*, target: Target, as_json: bool) -> Work:
    """List all tenants."""
    from manylora.cli import tenants

    return tenants.list_all(target, as_json=as_json)


@tenant_app.command()
@on_cluster
def delete(
    tenant_id: TenantId,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Remove a tenant, its adapters and its keys."""
    from manylora.cli import tenants

    if not yes:
        tenants.confirm_delete(tenant_id)
    return tenants.delete(target, tenant_id, as_json=as_json)


@tenant_app.command("lift-quarantine")
@on_cluster
def lift_quarantine(tenant_id: TenantId, *, target: Target, as_json: bool) -> Work:
    """Let all routers run a tenant's quarantined prompts again."""
    from manylora.cli import tenants

    return tenants.lift_quarantine(target, tenant_id, as_json=as_json)
