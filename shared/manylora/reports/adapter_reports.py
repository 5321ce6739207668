"""What `manylora adapter check`, `report`, `samples` and `export` do."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from manylora_shared.adapter_reference import ReferenceProblem, parse_reference

from manylora.cli.output import EXIT_FAILED, Target, print_json, print_table, say, usage_error, write
from manylora.demo import BASE_FOLDER
from manylora.reports.adapter_page import adapter_page

_MERGE = "manylora_worker.models.merging"


def name_and_number(reference: str) -> tuple[str, int]:
    """Of NAME or NAME@VERSION; 0: none is named."""
    try:
        parts = parse_reference(reference)
    except ReferenceProblem as e:
        raise usage_error(f"{reference}: {e}") from None
    if len(parts) != 1 or parts[0].weight != 1.0:
        raise usage_error(f"{reference}: must be NAME or NAME@VERSION")
    return parts[0].name, parts[0].version or 0


async def check(
    target: Target,
    tenant: str,
    source: str,
    *,
    name: str,
    samples: Path | None,
    judge: str,
    rope: str,
    html: Path | None,
    as_json: bool,
) -> None:
    given = _read(samples) if samples is not None else b""
    async with target.client() as client:
        checked = await client.adapters.check(tenant, source, name=name, samples=given, judge=judge, rope=rope)
    _show(checked.report, 0, html=html, as_json=as_json)
    if not checked.passed:
        raise typer.Exit(EXIT_FAILED)


async def report(target: Target, tenant: str, reference: str, *, html: Path | None, as_json: bool) -> None:
    name, number = name_and_number(reference)
    async with target.client() as client:
        adapter, kept = await client.adapters.report(tenant, name, number)
    _show(kept, adapter.number, html=html, as_json=as_json)


async def put_samples(target: Target, tenant: str, name: str, path: Path, *, as_json: bool) -> None:
    data = _read(path)
    async with target.client() as client:
        put = await client.adapters.put_samples(tenant, name, data)
    if as_json:
        print_json(put)
    else:
        write(f"{tenant}/{name}: {put.count} samples\n")


async def list_samples(target: Target, tenant: str, *, as_json: bool) -> None:
    async with target.client() as client:
        held = await client.adapters.list_samples(tenant)
    if as_json:
        print_json({"samples": held})
        return
    rows = [(each.name, each.size_bytes, _time(each.changed_unix_s)) for each in held]
    print_table(("samples", "bytes", "changed"), rows, empty="there are no samples")


async def remove_samples(target: Target, tenant: str, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        await client.adapters.remove_samples(tenant, name)
    if as_json:
        print_json({"tenant_id": tenant, "name": name, "removed": True})
    else:
        write(f"{tenant}/{name}: removed\n")


async def export(target: Target, tenant: str, reference: str, *, merged: Path, model: str, as_json: bool) -> None:
    """In a process of its own, with the worker's libraries: of the cluster come the adapter's bytes, and no more."""
    name, number = name_and_number(reference)
    _check_free(merged)
    with tempfile.TemporaryDirectory(prefix="manylora-export-") as folder:
        async with target.client() as client:
            adapter = await client.adapters.read(tenant, name, Path(folder), number)
            digest = ""
            if adapter.report:
                _, kept = await client.adapters.report(tenant, name, adapter.number)
                digest = kept.get("base", {}).get("digest", "")
        base = str(BASE_FOLDER) if model == "demo" else model
        command = [sys.executable, "-m", _MERGE, "--model", base, "--adapter", folder, "--output", str(merged)]
        process = await asyncio.create_subprocess_exec(*command, "--digest", digest, stdin=asyncio.subprocess.DEVNULL)
        if await process.wait() != 0:
            say(f"{reference} was not merged")
            raise typer.Exit(EXIT_FAILED)
    if as_json:
        print_json({"adapter": adapter, "folder": str(merged)})
    else:
        write(f"{adapter.tenant_id}/{adapter.name}@{adapter.number}: merged into {merged}\n")


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise usage_error(f"--merged {folder}: is there already, and not an empty folder")


def _show(kept: Mapping[str, Any], number: int, *, html: Path | None, as_json: bool) -> None:
    if html is not None:
        try:
            html.write_text(adapter_page(kept, version=number), encoding="utf-8")
        except OSError as e:
            raise usage_error(f"--html {html}: {e.strerror}") from None
    if as_json:
        print_json(kept)
        return
    of = f"{kept['tenant_id']}/{kept['name'] or 'adapter'}" + (f"@{number}" if number else "")
    write(f"{of} ({kept['digest'][:12]}): {kept['verdict']}\n")
    rows = [(each["stage"], each["state"], "; ".join(each["told"])) for each in kept["stages"]]
    print_table(("stage", "outcome", ""), rows, empty="")
    scores = kept.get("quality", {}).get("scores", {})
    if scores:
        write("scores: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()) + "\n")
    for name, figures in kept.get("load", {}).items():
        write(
            f"{name}: first token {figures['ttft_p50_ms']:.4g} ms, each further {figures['token_p50_ms']:.4g} ms, "
            f"wait for weights {figures['adapter_wait_max_ms']:.4g} ms, {figures['size_bytes'] / 1e6:.2f} MB\n"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise usage_error(f"{path}: {e.strerror}") from None


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
