"""`manylora encryption ...`: how what is stored is sealed."""

from __future__ import annotations

import dataclasses

import typer

from manylora.cli.output import (
    DEFAULT_SERVER,
    EXIT_FAILED,
    Json,
    Key,
    Server,
    Target,
    connect,
    print_json,
    print_table,
    run,
    say,
    write,
)

encryption_app = typer.Typer(help="How what is stored of tenants is sealed.", no_args_is_help=True)


@encryption_app.command()
def status(as_json: Json = False, server: Server = DEFAULT_SERVER, key: Key = None) -> None:
    """Show which key-encryption keys wrap how many tenants' data keys."""
    run(_status(connect(server, key), as_json=as_json), as_json=as_json)


@encryption_app.command()
def rotate(as_json: Json = False, server: Server = DEFAULT_SERVER, key: Key = None) -> None:
    """Wrap all data keys with a new key-encryption key, while everything stays readable."""
    run(_rotate(connect(server, key), as_json=as_json), as_json=as_json)


@encryption_app.command()
def seal(
    tenant: str = typer.Option("", help="Of this tenant alone."),
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Seal what still lies in the clear from before encryption was on."""
    run(_seal(connect(server, key), tenant, as_json=as_json), as_json=as_json)


async def _status(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        found = await client.encryption.get()
    if as_json:
        print_json(dataclasses.asdict(found))
    elif not found.is_on:
        write("nothing is sealed: the router has no --encryption\n")
    else:
        write(f"new data keys are wrapped by {found.wrapped_by}\n")
        print_table(
            ("key-encryption key", "data keys"), sorted(found.data_keys.items()), empty="there are no data keys"
        )


async def _rotate(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        told = await client.encryption.rotate()
    if as_json:
        print_json(dataclasses.asdict(told))
        return
    write(f"{told.rewrapped} data keys are wrapped by {told.wrapped_by}\n")
    if not told.forgotten:
        say("what earlier keys wrapped still opens, for the key service keeps them")


async def _seal(target: Target, tenant: str, *, as_json: bool) -> None:
    """Exit code 1 where something still lies in the clear."""
    items = []
    async with target.client() as client:
        async for item in client.encryption.seal(tenant):
            items.append(item)
            if not as_json:
                write(f"{item.tenant_id}: {item.what}: {item.problem or 'sealed'}\n")
    if as_json:
        print_json({"items": [dataclasses.asdict(item) for item in items]})
    elif not items:
        say("nothing lay in the clear")
    if any(item.problem for item in items):
        raise typer.Exit(EXIT_FAILED)
