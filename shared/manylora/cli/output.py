"""Where a command's words go: results to stdout, the rest to stderr. Exit codes: 0 done, 1 a request failed, 2 wrong
usage, 130 interrupted. With --json a failure is {"error": {"code", "message", "violations"}} on stdout, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from manylora.client import Client, RequestFailed, SyncClient

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
PIPE_COLUMNS = 1000  # what is no terminal gets tables whole, never folded
DEFAULT_SERVER = "127.0.0.1:7070"
HTTP_PORT_STEP = 10  # from a router's port to its HTTP API's
DEFAULT_HTTP = "http://127.0.0.1:7080"

Server = Annotated[
    str,
    typer.Option(
        envvar="MANYLORA_SERVER",
        metavar="HOST:PORT,...",
        help="The router to talk to, or several: the next takes over.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="MANYLORA_KEY",
        show_envvar=True,
        metavar="KEY",
        help="The API key (in the environment others cannot see it); "
        "default: the operator's of the local cluster at that address.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="The result as one JSON document on stdout.")]
Tenant = Annotated[str, typer.Option("--tenant", help="The tenant.")]


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """As it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: object) -> None:
    write(json.dumps(value, default=_plain, ensure_ascii=False) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str, to_stderr: bool = False
) -> None:
    """empty: said on stderr where there are no rows."""
    if not rows:
        say(empty)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(highlight=False, markup=False, stderr=to_stderr)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    console.print(table)


@dataclass(frozen=True)
class Target:
    """key: None: the one that the client finds."""

    server: str
    key: str | None
    tls_ca: str | None = None  # likewise

    def client(self, *, tenant: str = "") -> Client:
        from manylora.client import Client

        return self._connected(Client, tenant)

    def sync_client(self, *, tenant: str = "") -> SyncClient:
        from manylora.client import SyncClient

        return self._connected(SyncClient, tenant)

    def _connected(self, kind: Callable[..., T], tenant: str) -> T:
        from manylora_shared.transport.tls import TlsError

        try:
            return kind(self.server, key=self.key, tenant=tenant, tls_ca=self.tls_ca)
        except OSError as error:
            raise usage_error(f"the key of the cluster at {self.server} cannot be read: {error}") from None
        except TlsError as error:
            raise usage_error(f"--tls-ca: {error}") from None
        except ValueError as error:
            raise usage_error(f"--server: {error}") from None


_trusted: str | None = None  # what --tls-ca said, before the command


def trust(tls_ca: str | None) -> None:
    global _trusted
    _trusted = tls_ca


def connect(server: str, key: str | None) -> Target:
    return Target(server, key or None, _trusted)


def usage_error(message: str) -> typer.Exit:
    """For `raise usage_error(...)`."""
    say(f"Error: {message}")
    return typer.Exit(EXIT_USAGE)


def run(
    work: Coroutine[Any, Any, None],
    *,
    as_json: bool,
    runner: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    """Turns how the coroutine ends into an exit code."""
    from manylora.client import RequestFailed

    try:
        runner(work)
    except RequestFailed as error:
        report(error, as_json=as_json)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def report(error: RequestFailed, *, as_json: bool, others: Mapping[str, object] | None = None) -> None:
    """others: what was reached before, beside `error`."""
    told = [f"{violation.field}: {violation.description}" for violation in error.violations]
    if len(told) < 2:
        say(f"{error.code}: {error.message}")
    else:  # the message has them one behind the other, and the last ones not at all where it was cut
        message = f"{len(told)} errors" if error.message.startswith(told[0]) else error.message
        say("\n  ".join([f"{error.code}: {message}", *told]))
    if error.retry_after_s is not None:
        say(f"try again in {error.retry_after_s:g} s")
    if as_json:
        print_json({"error": error.to_json(), **(others or {})})


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
