"""`manylora key ...`: API keys. The key itself is printed when it is made and never again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from manylora.cli.output import Target, print_json, print_table, say, write
from manylora.client import KeyInfo


async def create(target: Target, scopes: Sequence[str], tenant: str, name: str, *, as_json: bool) -> None:
    async with target.client() as client:
        key, info = await client.keys.create(scopes, tenant=tenant, name=name)
    if as_json:
        print_json({"key": key, **_fields(info)})
    else:
        write(f"{key}\n")
        say(f"key {info.key_id} for {_holder(info)}, may {', '.join(info.scopes)}; it is not shown again")


async def list_all(target: Target, tenant: str, *, as_json: bool) -> None:
    async with target.client() as client:
        found = await client.keys.list(tenant)
    if as_json:
        print_json({"keys": [_fields(info) for info in found]})
    else:
        columns = ("key id", "tenant", "scopes", "name", "created", "revoked")
        print_table(columns, [_row(info) for info in found], empty="there are no keys")


async def revoke(target: Target, key_id: str, *, as_json: bool) -> None:
    async with target.client() as client:
        info = await client.keys.revoke(key_id)
    if as_json:
        print_json(_fields(info))
    else:
        write(f"{info.key_id}: revoked\n")


def _fields(info: KeyInfo) -> dict[str, object]:
    return {
        "key_id": info.key_id,
        "tenant_id": info.tenant_id,
        "scopes": list(info.scopes),
        "name": info.name,
        "created_unix_s": info.created_unix_s,
        "revoked_unix_s": info.revoked_unix_s,
    }


def _holder(info: KeyInfo) -> str:
    return f"tenant {info.tenant_id}" if info.tenant_id else "the cluster"


def _row(info: KeyInfo) -> tuple[object, ...]:
    return (
        info.key_id,
        info.tenant_id or "-",
        ",".join(info.scopes),
        info.name,
        _time(info.created_unix_s),
        _time(info.revoked_unix_s) if info.revoked_unix_s else "-",
    )


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
