"""`manylora adapter ...`: uploads with a progress bar, lists, removals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import typer

from manylora.cli.output import EXIT_FAILED, Target, print_json, print_table, say, stderr_console, write
from manylora.client import AdapterInfo, Client, RequestFailed
from manylora.client.adapter_documents import STORE_PREFIX
from manylora.client.aio import Progress


async def add(target: Target, tenant: str, name: str, path: str, *, pool: str, rope: str, as_json: bool) -> None:
    async with target.client() as client:
        if path.startswith(STORE_PREFIX):
            store_path = path.removeprefix(STORE_PREFIX)
            added = await client.adapters.add_from_store(tenant, name, store_path, pool=pool, rope=rope)
        elif "://" in path:
            added = await client.adapters.add_from_source(tenant, name, path, pool=pool, rope=rope)
        else:
            with _progress(f"{tenant}/{name}") as on_progress:
                added = await client.adapters.add(tenant, name, path, pool=pool, rope=rope, on_progress=on_progress)
        told = "" if as_json else await _who_gets(client, added)
    if as_json:
        print_json(added)
    else:
        full_name = f"{added.tenant_id}/{added.name}@{added.number}"
        context = f", contexts of {added.max_context_tokens} tokens" if added.max_context_tokens else ""
        write(f"{full_name}: added, digest {added.version}, rank {added.max_lora_rank}{context}{told}\n")


async def _who_gets(client: Client, added: AdapterInfo) -> str:
    """Of a further version: requests that name none get another."""
    if added.number == 1:
        return ""
    try:
        in_force = (await client.adapters.history(added.tenant_id, added.name)).in_force
    except RequestFailed:  # a key may add and not look; it is added all the same
        return ""
    return f"; version {in_force} stays in force" if in_force != added.number else ""


async def list_all(target: Target, tenant: str, *, as_json: bool) -> None:
    async with target.client() as client:
        adapters = await client.adapters.list(tenant)
    if as_json:
        print_json({"adapters": adapters})
    else:
        columns = ("tenant", "adapter", "version", "digest", "rank", "size", "pool", "modules", "created")
        print_table(columns, [_row(a) for a in adapters], empty="there are no adapters")


async def verify(target: Target, tenant: str, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        found = []
        async for each in client.adapters.verify(tenant, name):
            found.append(each)
            if not as_json:
                adapter = each.adapter
                told = f"damaged: {each.problem}" if each.problem else "ok"
                write(f"{adapter.tenant_id}/{adapter.name}@{adapter.number} ({adapter.version[:12]}): {told}\n")
    damaged = sum(bool(each.problem) for each in found)
    if as_json:
        print_json({"adapters": found})
    elif damaged:
        say(f"{damaged} of {len(found)} adapters are damaged; adding the same files again, under any name, mends them")
    elif not found:
        say("there are no adapters")
    if damaged:
        raise typer.Exit(EXIT_FAILED)


async def remove(target: Target, tenant: str, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        await client.adapters.remove(tenant, name)
    if as_json:
        print_json({"tenant_id": tenant, "name": name, "removed": True})
    else:
        write(f"{tenant}/{name}: removed\n")


def _row(adapter: AdapterInfo) -> tuple[object, ...]:
    created = datetime.fromtimestamp(adapter.created_unix_s, UTC).isoformat(timespec="seconds")
    return (
        adapter.tenant_id,
        adapter.name,
        f"{adapter.number} ({adapter.state})" if adapter.state else adapter.number,
        adapter.version[:12],
        adapter.max_lora_rank,
        f"{adapter.size_bytes / 1e6:.2f} MB",
        adapter.pool,
        ",".join(adapter.target_modules),
        created,
    )


@contextmanager
def _progress(label: str) -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    ) as bars:
        task = bars.add_task(f"uploading {label}", total=None)

        def on_progress(sent_bytes: int, total_bytes: int) -> None:
            text = f"checking {label}" if sent_bytes == total_bytes else f"uploading {label}"
            bars.update(task, completed=sent_bytes, total=total_bytes, description=text)

        yield on_progress
