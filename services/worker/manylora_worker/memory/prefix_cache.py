"""Which full KV blocks can be found again, and by whom. Only BlockPool writes it. Decision 13 has the keys and the
reasons.

    held --publish--> published --last reference goes--> idle --evict--> free

What is evicted depends on counts alone, never on others' lookups.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from collections import OrderedDict
from dataclasses import dataclass

from manylora_shared.composition import content_of
from manylora_shared.ids import AdapterKey, TenantId

from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import Sequence

SECRET_BYTES = 32
_NO_PARENT = bytes(32)
_KEPT_NAMESPACES = 1024
_SHA256_BLOCK_BYTES = 64


class PrefixKeys:
    """secret: `SECRET_BYTES` random bytes."""

    def __init__(self, secret: bytes, model_digest: str) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self._model_digest = model_digest
        self._kept_namespace = functools.lru_cache(maxsize=_KEPT_NAMESPACES)(self._make_namespace)

    def key_at(self, sequence: Sequence, index: int, block_size: int) -> bytes:
        """All tokens of the block are known."""
        keys = sequence.block_keys
        if index >= len(keys):
            namespace = self.namespace(sequence.group.cache_scope, sequence.group.request.adapter_uid)
            for i in range(len(keys), index + 1):
                tokens = sequence.tokens(i * block_size, (i + 1) * block_size)
                assert len(tokens) == block_size, f"block {i} is not full"
                keys.append(self.key(namespace, keys[-1] if keys else _NO_PARENT, tokens))
        return keys[index]

    def namespace(self, scope: CacheScope, adapter_uid: AdapterKey | None) -> Namespace:
        return self._kept_namespace(scope, adapter_uid)

    def _make_namespace(self, scope: CacheScope, adapter_uid: AdapterKey | None) -> Namespace:
        fields = [b"group" if scope.is_group else b"tenant", scope.name.encode(), self._model_digest.encode()]
        if adapter_uid is not None:
            fields.append(content_of(adapter_uid).encode())
        # With each field's length, no two lists of fields are the same bytes.
        message = b"".join(len(each).to_bytes(4, "little") + each for each in fields)
        return Namespace(hmac.digest(self._secret, message, "sha256"))

    def key(self, namespace: Namespace, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return namespace.mac(parent + struct.pack(f"<{len(token_ids)}I", *token_ids))


class Namespace:
    """HMAC-SHA256 (RFC 2104) under one key."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        assert len(key) <= _SHA256_BLOCK_BYTES
        padded = key.ljust(_SHA256_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def mac(self, message: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()


@dataclass(frozen=True)
class PrefixOptions:
    """tenant_share: part of the pool for one tenant's idle blocks."""

    keys: PrefixKeys
    tenant_share: float

    def __post_init__(self) -> None:
        if not 0.0 < self.tenant_share <= 1.0:
            raise ValueError("tenant_share must be over 0 and up to 1")

    def max_idle_blocks(self, num_blocks: int) -> int:
        return max(1, int(self.tenant_share * num_blocks))


class PrefixCache:
    """max_idle_blocks: of one tenant; 0: nothing is published."""

    def __init__(self, max_idle_blocks: int) -> None:
        self.max_idle_blocks = max_idle_blocks
        self._published: dict[CacheScope, dict[bytes, int]] = {}
        self._names: dict[int, tuple[CacheScope, bytes, TenantId]] = {}  # with the tenant that owns the block
        self._idle: dict[TenantId, OrderedDict[int, None]] = {}  # the one that is idle for longest first
        self._num_idle = 0
        self._by_num_idle: dict[int, dict[TenantId, None]] = {}
        self._most_idle = 0  # the greatest count of a tenant's idle blocks

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def idle_of(self, tenant_id: TenantId) -> int:
        return len(self._idle.get(tenant_id, ()))

    def find(self, scope: CacheScope, key: bytes) -> int | None:
        published = self._published.get(scope)
        return None if published is None else published.get(key)

    def is_published(self, block_id: int) -> bool:
        return block_id in self._names

    def is_idle(self, block_id: int) -> bool:
        name = self._names.get(block_id)
        return name is not None and block_id in self._idle.get(name[2], ())

    def published_blocks(self) -> dict[int, tuple[CacheScope, TenantId]]:
        return {block_id: (scope, tenant_id) for block_id, (scope, _, tenant_id) in self._names.items()}

    def idle_blocks(self) -> set[int]:
        return {block_id for idle in self._idle.values() for block_id in idle}

    def publish(self, scope: CacheScope, key: bytes, block_id: int, tenant_id: TenantId) -> None:
        """The first block of a key keeps it."""
        assert self.max_idle_blocks > 0
        if block_id in self._names:
            assert self._names[block_id] == (scope, key, tenant_id), f"block {block_id} has another key"
            return
        published = self._published.setdefault(scope, {})
        if key not in published:
            published[key] = block_id
            self._names[block_id] = (scope, key, tenant_id)

    def unpublish(self, block_id: int) -> None:
        name = self._names.pop(block_id, None)
        if name is None:
            return
        scope, key, tenant_id = name
        assert block_id not in self._idle.get(tenant_id, ())
        del self._published[scope][key]
        if not self._published[scope]:
            del self._published[scope]

    def rest(self, block_id: int) -> int | None:
        """The last reference went. Returns the block that its tenant gives up."""
        tenant_id = self._names[block_id][2]
        idle = self._idle.setdefault(tenant_id, OrderedDict())
        assert block_id not in idle
        idle[block_id] = None
        self._count(tenant_id, len(idle) - 1, len(idle))
        if len(idle) <= self.max_idle_blocks:
            return None
        return self._evict_of(tenant_id)

    def wake(self, block_id: int) -> None:
        tenant_id = self._names[block_id][2]
        idle = self._idle[tenant_id]
        del idle[block_id]
        self._count(tenant_id, len(idle) + 1, len(idle))
        if not idle:
            del self._idle[tenant_id]

    def evict(self, tenant_id: TenantId, *, own_first: bool) -> int:
        """The oldest idle block: of the tenant itself if `own_first` and it has one, else of whoever has the most."""
        if not own_first or self.idle_of(tenant_id) == 0:
            tenant_id = next(iter(self._by_num_idle[self._most_idle]))
        return self._evict_of(tenant_id)

    def check_invariants(self) -> None:
        published = {block: (scope, key) for scope, each in self._published.items() for key, block in each.items()}
        assert published == {block: name[:2] for block, name in self._names.items()}, (
            "a block has two names, or a name two blocks"
        )
        assert all(self._published.values()), "an empty index was kept"
        counts = {tenant: len(idle) for tenant, idle in self._idle.items()}
        assert all(counts.values()), "an empty tenant was kept"
        assert sum(counts.values()) == self._num_idle
        assert max(counts.values(), default=0) == self._most_idle <= self.max_idle_blocks
        ranked = {tenant: count for count, tenants in self._by_num_idle.items() for tenant in tenants}
        assert ranked == counts
        for tenant, idle in self._idle.items():
            assert all(self._names[block][2] == tenant for block in idle)

    def _evict_of(self, tenant_id: TenantId) -> int:
        block_id = next(iter(self._idle[tenant_id]))
        self.wake(block_id)
        self.unpublish(block_id)
        return block_id

    def _count(self, tenant_id: TenantId, before: int, after: int) -> None:
        """In constant time: counts change by one."""
        self._num_idle += after - before
        if before:
            ranks = self._by_num_idle[before]
            del ranks[tenant_id]
            if not ranks:
                del self._by_num_idle[before]
        if after:
            self._by_num_idle.setdefault(after, {})[tenant_id] = None
        if after > self._most_idle or (before == self._most_idle and before not in self._by_num_idle):
            self._most_idle = after
