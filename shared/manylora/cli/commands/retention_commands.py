"""`manylora retention ...`: prompts and answers that a tenant's policy keeps."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, Target, connect, print_json, run, say, write

retention_app = typer.Typer(
    help="Prompts and answers that a tenant's policy keeps (security.data_retention_days).", no_args_is_help=True
)

OwnTenant = Annotated[str, typer.Option(help="The tenant; a key that is bound to one needs no other.")]


@retention_app.command()
def export(
    tenant: OwnTenant = "",
    user: Annotated[str, typer.Option(help="Of this end user alone, as requests named it.")] = "",
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Write what is kept to stdout, a JSON object a line, oldest first."""
    run(_export(connect(server, key), tenant, user), as_json=False)


@retention_app.command()
def erase(
    user: Annotated[str, typer.Option(help="The end user, as requests named it.")],
    tenant: OwnTenant = "",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Remove all that is kept of one end user."""
    run(_erase(connect(server, key), tenant, user, as_json=as_json), as_json=as_json)


async def _export(target: Target, tenant: str, user: str) -> None:
    count = 0
    async with target.client() as client:
        async for text in client.texts.export(tenant, user=user):
            write(json.dumps(dataclasses.asdict(text), ensure_ascii=False) + "\n")
            count += 1
    say(f"{count} texts")


async def _erase(target: Target, tenant: str, user: str, *, as_json: bool) -> None:
    async with target.client() as client:
        erased = await client.texts.erase(user, tenant)
    if as_json:
        print_json({"erased": erased})
    else:
        write(f"{erased} texts are erased\n")
