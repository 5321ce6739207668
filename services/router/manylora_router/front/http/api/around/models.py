"""What is served, and whether and how it is: /v1/models, /health, /ready, /version, /metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as version_of
from typing import Any

from manylora_shared.adapter_reference import parse_reference
from manylora_shared.errors import NotFound, ServiceUnavailable, shown

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.intake import Models

_OWNER = "manylora"
_VERSION = version_of("manylora")


async def list_models(exchange: Exchange, door: Door) -> None:
    await exchange.answer({"object": "list", "data": _rows(_models(exchange, door))})


async def one_model(exchange: Exchange, door: Door) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    models = _models(exchange, door)
    ids = {name, *(name.removeprefix(f"{base}:") for base, _, _ in models.pools)}
    for row in _rows(models):
        if row["id"] in ids:
            await exchange.answer(row)
            return
    raise NotFound(f"model: {shown(name)} is not known to this tenant")


async def health(exchange: Exchange, door: Door) -> None:
    await exchange.answer({})


async def ready(exchange: Exchange, door: Door) -> None:
    """Whether a request would be taken."""
    if problem := door.intake.unready():
        raise ServiceUnavailable(problem, retry_after_s=1.0)
    await exchange.answer({})


async def version(exchange: Exchange, door: Door) -> None:
    await exchange.answer({"version": _VERSION})


async def metrics(exchange: Exchange, door: Door) -> None:
    told, content_type = await asyncio.to_thread(door.calls.telemetry.exposition, exchange.headers.get("accept", ""))
    await exchange.answer_bytes(told, content_type)


def _models(exchange: Exchange, door: Door) -> Models:
    return door.intake.models(asked.nameless(asked.caller_of(exchange.headers)))


def _rows(models: Models) -> list[dict[str, Any]]:
    rows = [
        _row(name, 0, root=model.name, parent=None, context=model.limits.max_context_tokens)
        for name, _, model in models.pools
    ]
    bases = {pool: (name, model) for name, pool, model in models.pools}
    for each in models.adapters:
        # Where an adapter has a base model's name, that name is the base model.
        if each.pool in bases and each.name not in {name for name, _, _ in models.pools}:
            base, model = bases[each.pool]
            context = model.limits.stretched(each.max_context_tokens).max_context_tokens
            rows.append(_row(each.name, int(each.created_unix_s), root=each.uid, parent=base, context=context))
    of_parts = {each.name: each for each in models.adapters}
    for name, parts in models.compositions.items():
        first = of_parts.get(parse_reference(parts)[0].name)
        if first is not None and first.pool in bases and name not in {base for base, _, _ in models.pools}:
            base, model = bases[first.pool]
            context = model.limits.stretched(first.max_context_tokens).max_context_tokens
            rows.append(_row(name, 0, root=parts, parent=base, context=context))
    return rows


def _row(name: str, created: int, *, root: str, parent: str | None, context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": _OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": context,
        "permission": [],
    }
