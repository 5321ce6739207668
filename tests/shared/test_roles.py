"""What scopes and roles permit."""

from __future__ import annotations

from manylora_shared.tenancy.roles import (
    CLUSTER_ROLES,
    CLUSTER_SCOPES,
    ROLES,
    TENANT_ROLES,
    TENANT_SCOPES,
    Role,
    Scope,
    fits,
    granted,
)


def test_each_role_is_of_a_tenant_or_of_none() -> None:
    assert {*CLUSTER_ROLES, *TENANT_ROLES} == set(Role) == set(ROLES)
    assert not set(CLUSTER_ROLES) & set(TENANT_ROLES)
    for role in TENANT_ROLES:
        assert not ROLES[role] & CLUSTER_SCOPES
    for role in CLUSTER_ROLES:
        assert not ROLES[role] & TENANT_SCOPES
    for scope in (Scope.ADMIN, Scope.OPERATOR):
        assert all(scope not in each for each in ROLES.values()), "what a role has is what it permits"


def test_every_scope_is_somebodys() -> None:
    assert set().union(*ROLES.values()) == set(Scope) - {Scope.ADMIN, Scope.OPERATOR}
    assert ROLES[Role.GENERATE] < ROLES[Role.TENANT_ADMIN]
    assert ROLES[Role.BILLING] < ROLES[Role.VIEWER] < ROLES[Role.CLUSTER_OPERATOR] < ROLES[Role.OWNER]
    writes = {scope for scope in Scope if scope.endswith((":write", ":delete"))} | {Scope.WEIGHTS_READ}
    assert not ROLES[Role.VIEWER] & writes


def test_names_that_are_not_known_permit_nothing() -> None:
    assert granted(("root", "audit"), "king") == frozenset()
    assert granted(("usage:read",), "") == {Scope.USAGE_READ}
    assert granted(("usage:read",), "viewer") == ROLES[Role.VIEWER]


def test_which_keys_may_have_a_scope() -> None:
    assert fits("usage:read", has_tenant=True)
    assert fits("usage:read", has_tenant=False)
    assert not fits("audit:read", has_tenant=True)
    assert not fits("generate", has_tenant=False)
