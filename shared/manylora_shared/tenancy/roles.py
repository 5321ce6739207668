"""What a key may: scopes, and roles, which are sets of them. Pure; imports nothing of ours.

A key that is bound to a tenant has its scopes inside the tenant; one that is bound to none has them in the cluster.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping


class Scope(enum.StrEnum):
    GENERATE = "generate"
    GATEWAY = "gateway"
    TENANTS_READ = "tenants:read"
    TENANTS_WRITE = "tenants:write"
    TENANTS_DELETE = "tenants:delete"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    CLUSTER_KEYS = "cluster-keys:write"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    WEIGHTS_READ = "weights:read"
    SAMPLES_READ = "samples:read"
    SAMPLES_WRITE = "samples:write"
    ROLLOUTS_WRITE = "rollouts:write"
    METRICS_READ = "metrics:read"
    TRACES_READ = "traces:read"
    USAGE_READ = "usage:read"
    AUDIT_READ = "audit:read"
    TEXTS_READ = "texts:read"
    TEXTS_ERASE = "texts:erase"
    CLUSTER_WRITE = "cluster:write"
    # What keys of before roles have; each permits several of those above.
    ADMIN = "admin"
    OPERATOR = "operator"


class Role(enum.StrEnum):
    OWNER = "owner"
    CLUSTER_OPERATOR = "operator"
    VIEWER = "viewer"
    BILLING = "billing"
    TENANT_ADMIN = "admin"
    GENERATE = "generate"


TENANT_SCOPES = frozenset({Scope.GENERATE, Scope.ADMIN})
CLUSTER_SCOPES = frozenset(
    {
        Scope.GATEWAY,
        Scope.OPERATOR,
        Scope.TENANTS_WRITE,
        Scope.TENANTS_DELETE,
        Scope.CLUSTER_KEYS,
        Scope.AUDIT_READ,
        Scope.CLUSTER_WRITE,
    }
)
TENANT_ROLES = (Role.TENANT_ADMIN, Role.GENERATE)
CLUSTER_ROLES = (Role.OWNER, Role.CLUSTER_OPERATOR, Role.VIEWER, Role.BILLING)

_SEES = frozenset({Scope.ADAPTERS_READ, Scope.METRICS_READ, Scope.TRACES_READ})
_ADAPTERS = frozenset(
    {
        Scope.ADAPTERS_WRITE,
        Scope.WEIGHTS_READ,
        Scope.SAMPLES_READ,
        Scope.SAMPLES_WRITE,
        Scope.ROLLOUTS_WRITE,
    }
)
_ALL = frozenset(Scope) - TENANT_SCOPES - {Scope.GATEWAY, Scope.OPERATOR}

_OWN = frozenset({Scope.KEYS_READ, Scope.KEYS_WRITE, Scope.TEXTS_READ, Scope.TEXTS_ERASE})

WIDE: Mapping[str, frozenset[Scope]] = {
    Scope.GENERATE: frozenset({Scope.GENERATE}) | _SEES,
    Scope.ADMIN: _SEES | _ADAPTERS | {Scope.TENANTS_READ, Scope.USAGE_READ},
    Scope.OPERATOR: _ALL,
}
ROLES: Mapping[str, frozenset[Scope]] = {
    Role.OWNER: _ALL | {Scope.GATEWAY},
    Role.CLUSTER_OPERATOR: _ALL - {Scope.TENANTS_DELETE, Scope.CLUSTER_KEYS},
    Role.VIEWER: _SEES | {Scope.TENANTS_READ, Scope.KEYS_READ, Scope.SAMPLES_READ, Scope.USAGE_READ, Scope.AUDIT_READ},
    Role.BILLING: frozenset({Scope.TENANTS_READ, Scope.USAGE_READ}),
    Role.TENANT_ADMIN: WIDE[Scope.GENERATE] | WIDE[Scope.ADMIN] | _OWN,
    Role.GENERATE: WIDE[Scope.GENERATE],
}


@functools.lru_cache(1024)
def granted(scopes: tuple[str, ...], role: str) -> frozenset[Scope]:
    """All that they permit; names that are not known permit nothing."""
    found = set(ROLES.get(role, ()))
    for name in scopes:
        if name in WIDE:
            found |= WIDE[name]
        elif name in tuple(Scope):
            found.add(Scope(name))
    return frozenset(found)


def fits(name: str, *, has_tenant: bool) -> bool:
    """Whether a key that is bound to a tenant, or to none, may have the scope."""
    return name not in (CLUSTER_SCOPES if has_tenant else TENANT_SCOPES)
