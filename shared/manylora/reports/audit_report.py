"""What `manylora audit verify`, `tail` and `export` do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from manylora_shared.audit.entries import Entry, NotALine, parse
from manylora_shared.audit.files import parts_of
from manylora_shared.audit.verify import ChainReport, Segment, verify
from manylora_shared.coordination.records import AuditHeadRecord

from manylora.cli.output import EXIT_FAILED, Target, print_json, print_table, say, usage_error, write

if TYPE_CHECKING:  # the client is loaded by the command that runs
    from manylora.client.keys import AuditCopy

HEADS = "heads.json"
_COLUMNS = ("time", "who", "may", "tenant", "from", "action", "outcome", "target", "detail")
_DIGEST_CHARS = 12


async def check(target: Target, folder: Path | None, public_keys: Sequence[Path], *, as_json: bool) -> None:
    trusted = [_public_key(path) for path in public_keys]
    silent: list[str] = []
    if folder is not None:
        segments, heads = _of_folder(folder)
    else:
        async with target.client() as client:
            copy = await client.audit.read()
        segments, heads, silent = copy.segments, copy.heads, copy.silent_router_ids
    reports = verify(segments, heads, trusted)
    is_whole = not silent and not any(report.problems for report in reports)
    if as_json:
        chains = [dataclasses.asdict(report) for report in reports]
        print_json({"is_whole": is_whole, "has_heads": heads is not None, "silent_routers": silent, "chains": chains})
    else:
        _show(reports, silent, has_heads=heads is not None)
    if not is_whole:
        raise typer.Exit(EXIT_FAILED)


def _show(reports: Sequence[ChainReport], silent: Sequence[str], *, has_heads: bool) -> None:
    for report in reports:
        write(f"chain {report.chain}: {report.entries} entries, {'WRONG' if report.problems else 'as written'}\n")
        for problem in report.problems:
            write(f"  {problem}\n")
        if report.behind_head:
            write(f"  {report.behind_head} entries are behind the signed head: they were written in the last moment\n")
        if report.torn_bytes:
            write(f"  a last line of {report.torn_bytes} bytes is cut: it is being written, or a crash cut it\n")
        if report.unfinished:
            write(f"  of {report.unfinished} acts nothing tells how they ended\n")
    for router_id in silent:
        write(f"{router_id} did not answer: what it has is not looked at\n")
    if not has_heads:
        write(f"there is no {HEADS}: what was cut off at a chain's end cannot be seen\n")
    if not reports:
        say("there is no audit log: routers keep one with --audit-log")


async def tail(target: Target, lines: int, *, as_json: bool) -> None:
    async with target.client() as client:
        copy = await client.audit.read(last=lines)
    entries = sorted(_entries(copy.segments), key=lambda entry: entry.at_unix_s)[-lines:]
    for router_id in copy.silent_router_ids:
        say(f"{router_id} did not answer")
    if as_json:
        print_json({"entries": [dataclasses.asdict(entry) for entry in entries]})
    else:
        print_table(_COLUMNS, [_row(entry) for entry in entries], empty="the audit log has no entries")


async def export(target: Target, folder: Path, *, as_json: bool) -> None:
    if await asyncio.to_thread(_has_files, folder):
        raise usage_error(f"{folder}: is not empty")
    async with target.client() as client:
        copy = await client.audit.read()
    await asyncio.to_thread(_write, folder, copy)
    told = {"folder": str(folder), "segments": len(copy.segments), "silent_routers": copy.silent_router_ids}
    if as_json:
        print_json(told)
    else:
        write(f"{folder}: {len(copy.segments)} segments of {len(copy.heads)} chains\n")
        for router_id in copy.silent_router_ids:
            say(f"{router_id} did not answer: what it has is missing")
    if copy.silent_router_ids:
        raise typer.Exit(EXIT_FAILED)


def _has_files(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _write(folder: Path, copy: AuditCopy) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for segment in copy.segments:
        (folder / segment.name).write_bytes(segment.data)
    heads = [json.loads(head.to_json()) for _, head in sorted(copy.heads.items())]
    (folder / HEADS).write_text(json.dumps({"heads": heads}, indent=1) + "\n", encoding="utf-8")


def _of_folder(folder: Path) -> tuple[list[Segment], dict[str, AuditHeadRecord] | None]:
    """heads: None: there are none."""
    try:
        segments = [part.read() for part in parts_of(folder)]
        if not (folder / HEADS).exists():
            return segments, None
        stored: Any = json.loads((folder / HEADS).read_bytes())
        heads = [AuditHeadRecord.from_json(json.dumps(each).encode()) for each in stored["heads"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise usage_error(f"{folder}: cannot be read: {error}") from None
    return segments, {head.chain: head for head in heads}


def _public_key(path: Path) -> str:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if len(text) != 64 or not all(char in "0123456789abcdef" for char in text):
        raise usage_error(f"--public-key: {path} holds no public key: 64 hexadecimal digits are expected")
    return text


def _entries(segments: Sequence[Segment]) -> list[Entry]:
    found = []
    for segment in segments:
        for line in segment.data.split(b"\n"):
            try:
                found += [parse(line).entry] if line else []
            except NotALine as error:
                say(f"{segment.name}: a line is skipped: {error}")
    return found


def _row(entry: Entry) -> tuple[object, ...]:
    change = f"{entry.before[:_DIGEST_CHARS] or '-'} > {entry.after[:_DIGEST_CHARS] or '-'}"
    detail = change if entry.before or entry.after else entry.detail
    time = datetime.fromtimestamp(entry.at_unix_s, UTC).isoformat(timespec="milliseconds")
    return (
        time,
        entry.who or entry.service,
        entry.may,
        entry.tenant or "-",
        entry.peer or "-",
        entry.action.rpartition("/")[2] if entry.action.startswith("AdminService/") else entry.action,
        entry.outcome,
        entry.target,
        detail,
    )
