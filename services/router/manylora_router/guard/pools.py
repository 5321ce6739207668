"""Which pool a request is for: by the model that it names, its adapter, and its tenant's policy. Pure; owns nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from manylora_shared.errors import InvalidRequest, NotFound, PermissionDenied, shown
from manylora_shared.ids import DEFAULT_POOL
from manylora_shared.metadata import ADAPTER_KEY
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_router.guard.admission import Adapter

MODEL = "model"


class Base(Protocol):
    """A pool's base model."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class ModelNames:
    """What a tenant may call the models of its pools, and which pool each is."""

    pools: Mapping[str, str] = field(default_factory=dict)
    own: str = ""  # of the pool where a request goes that names none; empty: no worker of it was ever seen

    def split(self, model: str) -> tuple[str, str]:
        """A model's name, or none, and an adapter's, or none: of MODEL, ADAPTER or MODEL:ADAPTER."""
        if model in self.pools:
            return model, ""
        for name in self.pools:
            if model.startswith(f"{name}:"):
                return name, model[len(name) + 1 :]
        return "", model


NO_NAMES = ModelNames()


def names_of(pools: Sequence[str], models: Mapping[str, Base]) -> ModelNames:
    """Base models' names come before pools', and where pools have the same base, the first is called so.

    Args:
        pools: of a policy.
    """
    found: dict[str, str] = {}
    for pool in pools:
        if pool in models:
            found.setdefault(models[pool].name, pool)
    for pool in pools:
        if pool != DEFAULT_POOL:  # which may be an adapter's name: that of its base is enough
            found.setdefault(pool, pool)
    own = models.get(pools[0])
    return ModelNames(found, own.name if own is not None else "")


def choose(policy: TenantPolicy, model: str, adapter: Adapter | None, models: Mapping[str, Base]) -> str:
    """`model`: a base's or a pool's name; empty: where the adapter belongs, else the policy's first pool.

    Raises:
        NotFound: there is no such model, or none for this tenant.
        InvalidRequest: the adapter is of another pool.
        PermissionDenied: the adapter is of a pool that the tenant may not use (any more).
    """
    pool = ""
    if model:
        pool = names_of(policy.pools, models).pools.get(model, model)
        if pool not in policy.pools:
            raise NotFound(f"{MODEL}: {shown(model)} is not known to this tenant")
    if adapter is None:
        return pool or policy.pools[0]
    if pool and pool != adapter.pool:
        known = models.get(pool)
        if known is None or not adapter.base_digest or known.digest != adapter.base_digest:
            message = f"{adapter.name!r} is an adapter of pool {adapter.pool}, and {pool} has another base model"
            raise InvalidRequest.of(ADAPTER_KEY, message)
        return pool
    if adapter.pool not in policy.pools:
        raise PermissionDenied(f"{ADAPTER_KEY}: this tenant may not use pool {adapter.pool}, whose adapter it names")
    return adapter.pool
