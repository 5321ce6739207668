"""What the console's pages read, as JSON documents. Each is bounded; none has a prompt, an answer or a key."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message
from manylora.v1 import admin_pb2
from manylora_shared.coordination.records import AdapterRecord

from manylora_router.history.adapter_use import AdapterUse, AdapterUses
from manylora_router.history.lives import Life
from manylora_router.history.samples import NUM_STEPS, STEP_S, Row, Samples

MAX_TENANTS = 200  # in a status for operators
MAX_DRAWN_TENANTS = 8  # each in a series of its own
MAX_ADAPTERS = 500
MAX_LIVES = 100

Unix = Callable[[float], float]  # of a time of the event loop's


# The status


def status_document(status: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """Of many tenants those that are busiest, and `left_out` others."""
    told, left_out = _busiest(status)
    return {**plain(told), "left_out": left_out}


def _busiest(status: admin_pb2.GetStatusResponse) -> tuple[admin_pb2.GetStatusResponse, int]:
    use: Counter[str] = Counter()
    for rows in _by_tenant(status):
        for row in rows:
            use[row.tenant_id] += 0
    if len(use) <= MAX_TENANTS:
        return status, 0
    for flow in status.scheduler.flows:
        use[flow.tenant_id] += (1 << 40) * (flow.running + flow.queued) + flow.served_cost
    kept = {tenant for tenant, _ in use.most_common(MAX_TENANTS)}
    told = admin_pb2.GetStatusResponse()
    told.CopyFrom(status)
    for rows in _by_tenant(told):
        few = [row for row in rows if row.tenant_id in kept]
        del rows[:]
        rows.extend(few)
    return told, len(use) - len(kept)


def _by_tenant(status: admin_pb2.GetStatusResponse) -> Iterator[Any]:
    """Its lists of tenants' rows."""
    for part in (status, status.scheduler, status.scheduler.overload):
        for field in part.DESCRIPTOR.fields:
            if (
                field.is_repeated
                and field.message_type is not None
                and "tenant_id" in field.message_type.fields_by_name
            ):
                yield getattr(part, field.name)


def plain(message: Message) -> dict[str, Any]:
    """With numbers as numbers, enumerators in their short form (empty: none that is known), null for what is absent."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_one(each, field) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _one(value, field)


def _one(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        prefix = names[0].name.removesuffix("UNSPECIFIED")
        return names[value].name.removeprefix(prefix).lower() if value and value in names else ""
    return value


# The last hour

_DRAWN = ("prompt_tokens", "completion_tokens")  # of each of many tenants


def history_document(samples: Samples, tenant: str, unix: Unix) -> dict[str, Any]:
    """Empty: of all tenants, with the greatest in series of their own."""
    drawn = samples.most_used(MAX_DRAWN_TENANTS) if not tenant else []
    return {
        "step_s": STEP_S,
        "most_steps": NUM_STEPS,
        "began_unix_s": unix(samples.began_at),
        "ended_unix_s": unix(samples.closed_at),
        "series": _series(samples.rows(tenant), Row._fields),
        "tenants": [{"tenant": each, "series": _series(samples.rows(each), _DRAWN)} for each in drawn],
    }


def _series(rows: list[Row | None], names: Iterable[str]) -> dict[str, list[Any]]:
    indices = {name: Row._fields.index(name) for name in names}
    return {name: [row[index] if row is not None else None for row in rows] for name, index in indices.items()}


# Adapters


def adapters_document(
    records: Mapping[str, AdapterRecord], uses: AdapterUses, tenant: str, unix: Unix
) -> dict[str, Any]:
    """records: by `tenant/name`. What was used last comes first."""
    used = (f"{use.tenant}/{use.reference.rpartition('@')[0]}" for use in uses.latest(tenant))
    order = dict.fromkeys(itertools.chain(used, records))
    found = [records[key] for key in order if key in records]
    rows = [_adapter(record, uses, unix) for record in found[:MAX_ADAPTERS]]
    return {"adapters": rows, "left_out": len(found) - len(rows)}


def _adapter(record: AdapterRecord, uses: AdapterUses, unix: Unix) -> dict[str, Any]:
    line = record.line
    rollout = line.rollout
    return {
        "tenant": record.tenant_id,
        "name": record.name,
        "in_force": line.in_force.number,
        "rollout": {"to": rollout.to, "percent": rollout.percent, "sticky": rollout.sticky} if rollout else None,
        "versions": [
            {
                "number": version.number,
                "uid": version.uid,
                "max_lora_rank": version.max_lora_rank,
                "size_bytes": version.size_bytes,
                "created_unix_s": version.created_unix_s,
                "retired_unix_s": version.retired_unix_s,
                "state": version.state,
                "use": _use(uses.get(record.tenant_id, f"{record.name}@{version.number}"), unix),
            }
            for version in line.versions
        ],
    }


def _use(use: AdapterUse | None, unix: Unix) -> dict[str, Any] | None:
    if use is None:
        return None
    return {
        "requests": use.requests,
        "on_device": use.on_device,
        "on_host": use.on_host,
        "in_store": use.in_store,
        "waited_ms": use.waited_ms,
        "used_unix_s": unix(use.used_at),
    }


# Requests

_TIMES = (
    "admitted_at",
    "granted_at",
    "started_at",
    "first_token_at",
    "pause_ended_at",
    "last_token_at",
    "ended_at",
)  # told as milliseconds since the request came
_FACTS = (
    "request_id",
    "tenant",
    "qos_class",
    "adapter",
    "adapter_digest",
    "adapter_found",
    "stage",
    "outcome",
    "attempts",
    "worker_id",
    "queue_ms",
    "resumes",
    "adapter_wait_ms",
    "prefill_ms",
    "decode_ms",
    "choices",
    "max_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
)
_OTHERS_DOING = ("swaps", "evictions")  # they tell of other tenants' use


def lives_document(lives: Iterable[Life], unix: Unix, now: float, *, is_operator: bool) -> dict[str, Any]:
    few = itertools.islice(lives, MAX_LIVES)
    return {"requests": [life_document(life, unix, now, is_operator=is_operator) for life in few]}


def life_document(life: Life, unix: Unix, now: float, *, is_operator: bool) -> dict[str, Any]:
    told: dict[str, Any] = {name: getattr(life, name) for name in _FACTS}
    told |= {name: getattr(life, name) if is_operator else None for name in _OTHERS_DOING}
    for name in _TIMES:
        at = getattr(life, name)
        told[name.removesuffix("at") + "ms"] = None if at is None else 1e3 * (at - life.arrived_at)
    told["resume_ms"] = 1e3 * life.resume_s
    told["longest_pause_ms"] = 1e3 * life.longest_pause_s
    told["arrived_unix_s"] = unix(life.arrived_at)
    told["age_ms"] = 1e3 * (now - life.arrived_at)
    return told
