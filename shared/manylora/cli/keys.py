"""`manylora key ...`: API keys. The key itself is printed when it is made and never again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from manylora.cli.output import Target, print_json, print_table, say, usage_error, write

if TYPE_CHECKING:  # the client is loaded by the command that runs
    from manylora.client import KeyInfo

_LIMITS = {"requests_per_min": "requests/min", "tokens_per_min": "tokens/min", "concurrency": "at once"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_S = 1_000_000 * _UNITS["d"]  # some times later there are no dates
_MOST_DIGITS = 12


def seconds(flag: str, text: str) -> float:
    """Of `90d`, `12h`, `30m`, `10s`; 0 of an empty one."""
    number, unit = text[:-1], text[-1:]
    if not text:
        return 0.0
    if not (number.isascii() and number.isdigit() and unit in _UNITS):
        raise usage_error(f"{flag}: {text[:40]!r} is no time such as 90d, 12h, 30m or 10s")
    if len(number) > _MOST_DIGITS or int(number) * _UNITS[unit] > _MOST_S:
        raise usage_error(f"{flag}: {text[:40]!r} is more than {_MOST_S // _UNITS['d']}d")
    return float(int(number) * _UNITS[unit])


async def create(
    target: Target,
    scopes: Sequence[str],
    tenant: str,
    name: str,
    *,
    role: str,
    lifetime_s: float,
    networks: Sequence[str],
    limits: Mapping[str, int],
    as_json: bool,
) -> None:
    async with target.client() as client:
        key, info = await client.keys.create(
            scopes, role=role, tenant=tenant, name=name, lifetime_s=lifetime_s, networks=networks, **limits
        )
    if as_json:
        print_json({"key": key, **_fields(info)})
    else:
        write(f"{key}\n")
        until = f", until {_time(info.expires_unix_s)}" if info.expires_unix_s else ""
        say(f"key {info.key_id} for {_holder(info)}, with {_may(info)}{until}; it is not shown again")


async def rotate(target: Target, key_id: str, overlap_s: float, lifetime_s: float, *, as_json: bool) -> None:
    async with target.client() as client:
        key, info, replaced = await client.keys.rotate(key_id, overlap_s=overlap_s, lifetime_s=lifetime_s)
    if as_json:
        print_json({"key": key, **_fields(info), "replaced": _fields(replaced)})
    else:
        write(f"{key}\n")
        say(
            f"key {info.key_id} for {_holder(info)} takes the place of {replaced.key_id}, "
            f"which ends {_time(replaced.expires_unix_s)}; it is not shown again"
        )


async def list_all(target: Target, tenant: str, *, as_json: bool) -> None:
    async with target.client() as client:
        found = await client.keys.list(tenant)
    if as_json:
        print_json({"keys": [_fields(info) for info in found]})
    else:
        columns = ("key id", "tenant", "may", "name", "created", "expires", "revoked", "networks", "limits")
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
        "role": info.role,
        "name": info.name,
        "created_unix_s": info.created_unix_s,
        "revoked_unix_s": info.revoked_unix_s,
        "expires_unix_s": info.expires_unix_s,
        "networks": list(info.networks),
        **{name: getattr(info, name) for name in _LIMITS},
    }


def _may(info: KeyInfo) -> str:
    return ", ".join([*info.scopes, *([f"role {info.role}"] if info.role else [])])


def _holder(info: KeyInfo) -> str:
    return f"tenant {info.tenant_id}" if info.tenant_id else "the cluster"


def _row(info: KeyInfo) -> tuple[object, ...]:
    return (
        info.key_id,
        info.tenant_id or "-",
        _may(info),
        info.name,
        _time(info.created_unix_s),
        _time(info.expires_unix_s) if info.expires_unix_s else "-",
        _time(info.revoked_unix_s) if info.revoked_unix_s else "-",
        ",".join(info.networks) or "-",
        ", ".join(f"{getattr(info, name)} {words}" for name, words in _LIMITS.items() if getattr(info, name)) or "-",
    )


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
