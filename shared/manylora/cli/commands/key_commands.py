"""The commands on API keys, and their options; `keys` does what they say."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any

import typer
from manylora_shared.tenancy.key_limits import MAX_LIMIT
from manylora_shared.tenancy.roles import Role, Scope

from manylora.cli import keys
from manylora.cli.commands.on_cluster import on_cluster
from manylora.cli.output import Target, usage_error

key_app = typer.Typer(help="API keys: who may call, and for whom.", no_args_is_help=True)

Expires = Annotated[str, typer.Option(metavar="TIME", help="After how long it ends: 90d, 12h, 30m; default: never.")]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID")]
Work = Coroutine[Any, Any, None]


@key_app.command()
@on_cluster
def create(
    tenant: Annotated[
        str, typer.Option(help="The tenant that the key is bound to; without one it is the cluster's.")
    ] = "",
    role: Annotated[
        Role | None,
        typer.Option(help="admin and generate are with --tenant, the others without; default: --scope."),
    ] = None,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="May be repeated; default: generate with --tenant. gateway and operator are without one."),
    ] = None,
    name: Annotated[str, typer.Option(help="What you call it.")] = "",
    expires: Expires = "",
    network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="From where it may be used; may be repeated.")
    ] = None,
    requests_per_min: Annotated[int, typer.Option(min=0, max=MAX_LIMIT, help="Of this key; 0: its tenant's.")] = 0,
    tokens_per_min: Annotated[int, typer.Option(min=0, max=MAX_LIMIT, help="Of prompts and answers; likewise.")] = 0,
    concurrency: Annotated[int, typer.Option(min=0, max=MAX_LIMIT, help="Requests under way; likewise.")] = 0,
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Make an API key. It is shown once, on stdout, and kept nowhere."""
    if not scope and not tenant and role is None:
        raise usage_error("give --tenant, or --role owner, operator, viewer or billing, or --scope gateway")
    if scope and role is not None:
        raise usage_error("--role: goes not with --scope: it is a set of them")
    default = [] if role is not None else [Scope.GENERATE]
    return keys.create(
        target,
        [each.value for each in scope or default],
        tenant,
        name,
        role=role.value if role is not None else "",
        lifetime_s=keys.seconds("--expires", expires),
        networks=network or [],
        limits={
            "requests_per_min": requests_per_min,
            "tokens_per_min": tokens_per_min,
            "concurrency": concurrency,
        },
        as_json=as_json,
    )


@key_app.command()
@on_cluster
def rotate(
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(metavar="TIME", help="For how long the old key goes on.")] = "24h",
    expires: Expires = "",
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """Make a key like this one; the old one goes on for the overlap. --expires: else as long as the old one's life."""
    overlap_s, lifetime_s = keys.seconds("--overlap", overlap), keys.seconds("--expires", expires)
    return keys.rotate(target, key_id, overlap_s, lifetime_s, as_json=as_json)


@key_app.command("list")
@on_cluster
def list_all(
    tenant: Annotated[str, typer.Option(help="Only those bound to this tenant.")] = "",
    *,
    target: Target,
    as_json: bool,
) -> Work:
    """List keys by their ids, revoked ones too."""
    return keys.list_all(target, tenant, as_json=as_json)


@key_app.command()
@on_cluster
def revoke(key_id: KeyId, *, target: Target, as_json: bool) -> Work:
    """Revoke a key: new requests with it are refused at once, requests in flight go on."""
    return keys.revoke(target, key_id, as_json=as_json)
