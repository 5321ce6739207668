"""DataService's kept texts: who may see and erase them is the table of rules', what is kept is the keeper's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from manylora.v1 import data_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.errors import InvalidRequest, NotFound, Unready
from manylora_shared.ids import TenantId, is_valid_name

from manylora_router.keeping.texts import TextKeeper
from manylora_router.links.entrance import KnownCall
from manylora_router.request.tapes import MAX_USER_CHARS


class RetentionDesk:
    """keeper: None: nothing is kept, for nothing could be sealed."""

    def __init__(self, store: Store, keeper: TextKeeper | None) -> None:
        self._store = store
        self._keeper = keeper

    @property
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        return {"ExportTexts": self.export, "EraseTexts": self.erase}

    async def export(
        self, request: data_pb2.ExportTextsRequest, call: KnownCall
    ) -> AsyncIterator[data_pb2.ExportTextsResponse]:
        tenant = await self._tenant(request.tenant_id, call)
        keeper = self._kept()
        await call.will(f"kept texts of tenant {tenant}", request.user.encode() or None)
        async for text in keeper.export(tenant, request.user):
            yield data_pb2.ExportTextsResponse(
                request_id=text.request_id,
                at_unix_s=text.at_unix_s,
                user=text.user,
                adapter=text.adapter,
                prompt=text.prompt,
                answers=text.answers,
                whole=text.is_whole,
            )

    async def erase(self, request: data_pb2.EraseTextsRequest, call: KnownCall) -> data_pb2.EraseTextsResponse:
        tenant = await self._tenant(request.tenant_id, call)
        if not request.user or len(request.user) > MAX_USER_CHARS:
            raise InvalidRequest.of("user", f"must have 1 to {MAX_USER_CHARS} characters")
        keeper = self._kept()
        await call.will(f"kept texts of an end user of tenant {tenant}", request.user.encode())
        return data_pb2.EraseTextsResponse(erased=await keeper.erase(tenant, request.user))

    def _kept(self) -> TextKeeper:
        """Raises Unready."""
        if self._keeper is None:
            raise Unready("this router has no --encryption, so no texts are kept, whatever policies say")
        return self._keeper

    async def _tenant(self, named: str, call: KnownCall) -> TenantId:
        """Raises PermissionDenied, InvalidRequest, NotFound."""
        tenant = call.principal.require_tenant(named)
        if not tenant:
            raise InvalidRequest.of("tenant_id", "is missing")
        if not is_valid_name(tenant) or await self._store.get(keys.tenant(tenant)) is None:
            raise NotFound(f"tenant_id: tenant {tenant[:80]!r} is not known")
        return TenantId(tenant)
