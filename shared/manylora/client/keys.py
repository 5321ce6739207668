"""API keys, the sealing of stores, kept texts and the audit log, as a client that may sees to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from manylora_shared.audit.verify import Segment
from manylora_shared.coordination.records import AuditHeadRecord
from manylora_shared.errors import RpcError
from manylora_shared.transport.base import methods_of

from manylora.client.caller import DEFAULT_TIMEOUT_S, Caller
from manylora.client.cluster import Encryption, KeptText, KeyInfo, RotatedEncryption, SealedItem
from manylora.client.messages import key_from
from manylora.v1 import admin_pb2, data_pb2

_ADMIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
_DATA = methods_of(data_pb2.DESCRIPTOR.services_by_name["DataService"])
ROTATE_TIMEOUT_S = 600.0  # every tenant's data key is wrapped anew


class Keys:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def create(
        self,
        scopes: Sequence[str] = (),
        *,
        role: str = "",
        tenant: str = "",
        name: str = "",
        lifetime_s: float = 0.0,
        networks: Sequence[str] = (),
        requests_per_min: int = 0,
        tokens_per_min: int = 0,
        concurrency: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[str, KeyInfo]:
        """The new key, which nothing will show again, and its record.

        Args:
            scopes: docs/API.md has them.
            role: in their place: admin, generate (with a tenant); owner, operator, viewer, billing (without one).
            tenant: to which it is bound; empty: to none.
            lifetime_s: 0: it does not end.
            networks: CIDR, from where it may be used; none: from everywhere.
            requests_per_min: 0: only the tenant's quotas bound it, as with tokens_per_min and concurrency.
        """
        request = admin_pb2.CreateKeyRequest(
            tenant_id=tenant,
            scopes=scopes,
            role=role,
            name=name,
            lifetime_s=lifetime_s,
            networks=networks,
            requests_per_min=requests_per_min,
            tokens_per_min=tokens_per_min,
            concurrency=concurrency,
        )
        answer = await self._caller.call(_ADMIN["CreateKey"], request, timeout_s=timeout_s, repeatable=False)
        return answer.key, key_from(answer.info)

    async def list(self, tenant: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[KeyInfo, ...]:
        """Revoked ones too, oldest first; with a tenant those bound to it."""
        request = admin_pb2.ListKeysRequest(tenant_id=tenant)
        answer = await self._caller.call(_ADMIN["ListKeys"], request, timeout_s=timeout_s)
        return tuple(key_from(k) for k in answer.keys)

    async def rotate(
        self, key_id: str, *, overlap_s: float, lifetime_s: float = 0.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, KeyInfo, KeyInfo]:
        """A new key like this one, its record, and the old one's, which goes on for `overlap_s`.

        Args:
            lifetime_s: of the new one; 0: as long as the old one's was.
        """
        request = admin_pb2.RotateKeyRequest(key_id=key_id, overlap_s=overlap_s, lifetime_s=lifetime_s)
        answer = await self._caller.call(_ADMIN["RotateKey"], request, timeout_s=timeout_s, repeatable=False)
        return answer.key, key_from(answer.info), key_from(answer.replaced)

    async def revoke(self, key_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyInfo:
        request = admin_pb2.RevokeKeyRequest(key_id=key_id)
        return key_from((await self._caller.call(_ADMIN["RevokeKey"], request, timeout_s=timeout_s)).info)


class Sealing:
    """Only an operator's key may call these."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def get(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Encryption:
        answer = await self._caller.call(_DATA["GetEncryption"], data_pb2.GetEncryptionRequest(), timeout_s=timeout_s)
        return Encryption(answer.on, answer.wrapped_by, dict(answer.data_keys))

    async def rotate(self, *, timeout_s: float = ROTATE_TIMEOUT_S) -> RotatedEncryption:
        """Another key wraps all data keys from now on."""
        request = data_pb2.RotateEncryptionRequest()
        answer = await self._caller.call(_DATA["RotateEncryption"], request, timeout_s=timeout_s, repeatable=False)
        return RotatedEncryption(answer.wrapped_by, answer.rewrapped, answer.forgotten)

    async def seal(self, tenant: str = "", *, timeout_s: float | None = None) -> AsyncIterator[SealedItem]:
        """Seals what still lies in the clear; of every tenant where none is named."""
        request = data_pb2.SealStoresRequest(tenant_id=tenant)
        async for each in self._caller.answers(_DATA["SealStores"], request, timeout_s=timeout_s):
            yield SealedItem(each.tenant_id, each.what, each.problem)


@dataclass
class AuditCopy:
    """What routers have of the audit log."""

    heads: dict[str, AuditHeadRecord] = field(default_factory=dict)  # by chain
    segments: list[Segment] = field(default_factory=list)
    silent_router_ids: list[str] = field(default_factory=list)  # what they have is missing


class Audit:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def read(self, *, last: int = 0, timeout_s: float | None = None) -> AuditCopy:
        """last: only so many entries of each chain, opened where they are sealed; 0: all, as they lie there."""
        self._caller.check_open()
        request = admin_pb2.ReadAuditRequest(last=last)
        stream = self._caller.stream(_ADMIN["ReadAudit"], request, timeout_s=timeout_s)
        found, parts = AuditCopy(), dict[tuple[str, int], bytearray]()
        try:
            while (answer := await stream.read()) is not None:
                for head in answer.heads:
                    values = {each.name: getattr(head, each.name) for each in head.DESCRIPTOR.fields}
                    found.heads[head.chain] = AuditHeadRecord(**values)
                if answer.HasField("part"):
                    part = parts.setdefault((answer.part.chain, answer.part.number), bytearray())
                    part.extend(answer.part.shown or answer.part.data)
                if answer.silent_router_id:
                    found.silent_router_ids.append(answer.silent_router_id)
        except RpcError as error:
            raise self._caller.failed(error) from None
        finally:
            stream.cancel()
        found.segments = [Segment(*name, bytes(data)) for name, data in sorted(parts.items())]
        return found


class KeptTexts:
    """Prompts and answers that a tenant's policy keeps. A key of the tenant needs to name none."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def export(
        self, tenant: str = "", *, user: str = "", timeout_s: float | None = None
    ) -> AsyncIterator[KeptText]:
        """Of one end user, or with an empty one of all; oldest first."""
        request = data_pb2.ExportTextsRequest(tenant_id=tenant, user=user)
        async for each in self._caller.answers(_DATA["ExportTexts"], request, timeout_s=timeout_s):
            yield KeptText(
                each.request_id, each.at_unix_s, each.user, each.adapter, each.prompt, tuple(each.answers), each.whole
            )

    async def erase(self, user: str, tenant: str = "", *, timeout_s: float = ROTATE_TIMEOUT_S) -> int:
        """How many texts of the end user went."""
        request = data_pb2.EraseTextsRequest(tenant_id=tenant, user=user)
        answer = await self._caller.call(_DATA["EraseTexts"], request, timeout_s=timeout_s)
        return int(answer.erased)
