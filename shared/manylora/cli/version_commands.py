"""The commands on an adapter's versions and their options; `versions` does what they say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, Tenant, connect, run

if TYPE_CHECKING:  # the client is loaded by the command that runs
    from manylora.client import AdapterLine
    from manylora.client.aio import Adapters

adapter_app = typer.Typer(help="Adapters in tenants' namespaces.", no_args_is_help=True)


@adapter_app.command()
def rollout(
    name: Annotated[str, typer.Argument()],
    to: Annotated[int, typer.Option(help="The version.", min=1)],
    percent: Annotated[int, typer.Option(help="Of the requests that name no version.", min=0, max=100)],
    tenant: Tenant,
    sticky: Annotated[str, typer.Option(help="request, conversation or user: who keeps a version.")] = "request",
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Give a version to a share of the requests."""

    def make(adapters: Adapters) -> Awaitable[AdapterLine]:
        return adapters.rollout(tenant, name, to=to, percent=percent, sticky=sticky)

    _run(server, key, name, make, as_json=as_json)


@adapter_app.command()
def promote(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    to: Annotated[int, typer.Option(help="Default: the rollout's, or else the newest.")] = 0,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Put a version in force for all."""

    def make(adapters: Adapters) -> Awaitable[AdapterLine]:
        return adapters.promote(tenant, name, to=to)

    _run(server, key, name, make, as_json=as_json)


@adapter_app.command()
def rollback(
    name: Annotated[str, typer.Argument()],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """End a rollout; where there is none, take the last promotion back."""

    def make(adapters: Adapters) -> Awaitable[AdapterLine]:
        return adapters.rollback(tenant, name)

    _run(server, key, name, make, as_json=as_json)


@adapter_app.command()
def retire(
    name: Annotated[str, typer.Argument()],
    number: Annotated[int, typer.Argument(help="The version.", min=1)],
    tenant: Tenant,
    as_json: Json = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
) -> None:
    """Take a version out that nobody gets."""

    def make(adapters: Adapters) -> Awaitable[AdapterLine]:
        return adapters.retire(tenant, name, number)

    _run(server, key, name, make, as_json=as_json)


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
