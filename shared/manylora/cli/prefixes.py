"""`manylora prefix ...`: public prefixes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from manylora.cli.files import read_file
from manylora.cli.output import Target, print_json, print_table, write


async def add(target: Target, name: str, file: Path, *, is_system: bool, as_json: bool) -> None:
    text = read_file(file)
    async with target.client() as client:
        prompt = [{"role": "system", "content": text}] if is_system else text
        added = await client.public_prefixes.add(name, prompt)
    if as_json:
        print_json(added)
    else:
        write(f"{added.name}: public, {added.tokens} tokens\n")


async def list_all(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        found = await client.public_prefixes.list()
    if as_json:
        print_json({"prefixes": found})
    else:
        rows = [
            (each.name, each.tokens, datetime.fromtimestamp(each.created_unix_s, UTC).isoformat(timespec="seconds"))
            for each in found
        ]
        print_table(("prefix", "tokens", "created"), rows, empty="there are no public prefixes")


async def remove(target: Target, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        await client.public_prefixes.remove(name)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        write(f"{name}: removed\n")
