"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: AdminService's calls under other names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from manylora.v1 import admin_pb2
from manylora_shared.errors import AlreadyExists, HttpError
from manylora_shared.metadata import REQUEST_ID_KEY
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY

from manylora_router.front.http.api import asked
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.exchange import Exchange
from manylora_router.front.http.fields import Fields

_NAMES = {
    "header.name": "lora_name",
    "header.source": "lora_path",
    "header.store_path": "lora_path",
    "header.tenant_id": "x-tenant-id",
    "tenant_id": "x-tenant-id",
    "name": "lora_name",
    "source": "lora_path",
    "store_path": "lora_path",
}


class AlreadyLoaded(AlreadyExists):
    own_http = HttpError(400, "invalid_request_error")  # what controllers of vLLM take for done


@dataclass(frozen=True)
class AdminCall:
    """Of transport.base.ServerCall."""

    metadata: Mapping[str, str]
    peer: str

    def time_remaining(self) -> float | None:
        return None


async def load(exchange: Exchange, door: Door) -> None:
    """The path is a source's address, or one in the adapter store, which operators' keys may name."""
    fields = await door.read(exchange)
    name, path = _required(fields, "lora_name"), _required(fields, "lora_path")
    fields.only("load_inplace", False)
    fields.only("is_3d_lora_weight", False)
    fields.ignore("base_model_name")
    fields.close()
    fields.check()
    exchange.names = _NAMES
    caller = asked.caller_of(exchange.headers)
    where = "source" if "://" in path else "store_path"
    header = admin_pb2.AddAdapterHeader(tenant_id=caller.tenant, name=name, only_new=True)
    setattr(header, where, path)

    async def requests() -> AsyncIterator[admin_pb2.AddAdapterRequest]:
        yield admin_pb2.AddAdapterRequest(header=header)

    try:
        await door.admin["AddAdapter"](requests(), admin_call(exchange, caller))
    except AlreadyExists:
        raise AlreadyLoaded(f"The lora adapter '{name}' has already been loaded.") from None
    await _say(exchange, f"Success: LoRA adapter '{name}' added successfully.")


async def unload(exchange: Exchange, door: Door) -> None:
    fields = await door.read(exchange)
    name = _required(fields, "lora_name")
    fields.ignore("lora_int_id")
    fields.close()
    fields.check()
    exchange.names = _NAMES
    caller = asked.caller_of(exchange.headers)
    request = admin_pb2.RemoveAdapterRequest(tenant_id=caller.tenant, name=name)
    await door.admin["RemoveAdapter"](request, admin_call(exchange, caller))
    await _say(exchange, f"Success: LoRA adapter '{name}' removed successfully.")


def _required(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if not value and not fields.found:
        fields.wrong(name, "is missing")
    return value


def admin_call(exchange: Exchange, caller: asked.Caller) -> AdminCall:
    own = {AUTHORIZATION_KEY: caller.authorization, REQUEST_ID_KEY: exchange.request_id}
    return AdminCall({**exchange.headers, **own}, exchange.peer)


async def _say(exchange: Exchange, words: str) -> None:
    await exchange.answer_bytes(words.encode(), "text/plain; charset=utf-8")
