"""API keys: only the whole key of a record in force is one, and a refusal does not say why."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.coordination.records import KeyRecord
from manylora_shared.errors import Code, InvalidRequest, PermissionDenied, Unauthenticated
from manylora_shared.ids import TenantId
from manylora_shared.tenancy import identity
from manylora_shared.tenancy.identity import (
    Principal,
    authenticate,
    bearer,
    bearer_of,
    host_of,
    is_key,
    new_key,
    split_key,
)
from manylora_shared.tenancy.roles import Role, Scope

RNG = random.Random(3)
MADE = new_key(RNG.getrandbits, tenant_id="acme", scopes=["generate"], name="ci", now_unix_s=5.0)
OTHER = new_key(RNG.getrandbits, tenant_id="other", scopes=["admin", "generate"], name="", now_unix_s=6.0)
RECORDS = {made.record.key_id: made.record for made in (MADE, OTHER)}


def known(
    metadata: dict[str, str],
    record_of: Callable[[str], KeyRecord | None] = RECORDS.get,
    now_unix_s: float = 10.0,
    host: str | None = None,
) -> Principal:
    return authenticate(bearer_of(metadata.get("authorization", "")), record_of, now_unix_s=now_unix_s, host=host)


def test_a_key_is_its_records_alone() -> None:
    assert known(bearer(MADE.key)) == Principal(MADE.record.key_id, TenantId("acme"), (Scope.GENERATE,))
    assert known({"authorization": f"bearer  {OTHER.key} "}).tenant_id == "other"
    assert is_key(MADE.key, MADE.record)
    assert not is_key(MADE.key, OTHER.record)
    assert not is_key("mlk", MADE.record)


def test_the_record_holds_neither_key_nor_secret() -> None:
    _, secret = split_key(MADE.key) or ("", "")
    text = MADE.record.to_json().decode()
    assert len(secret) == 64
    assert secret not in text
    assert MADE.key not in text
    assert secret not in repr(MADE)
    assert KeyRecord.from_json(text.encode()) == MADE.record


def refusal(
    metadata: dict[str, str],
    records: dict[str, KeyRecord] = RECORDS,
    now_unix_s: float = 10.0,
    host: str | None = None,
) -> tuple[Code, str]:
    with pytest.raises(Unauthenticated) as error:
        known(metadata, records.get, now_unix_s, host)
    assert not error.value.violations
    return error.value.code, error.value.message


def test_every_wrong_key_is_answered_in_the_same_words() -> None:
    key_id, secret = split_key(MADE.key) or ("", "")
    _, other_secret = split_key(OTHER.key) or ("", "")
    moved = {key_id: dataclasses.replace(OTHER.record, key_id=key_id)}
    answers = {
        refusal({}),
        refusal({"authorization": ""}),
        refusal({"authorization": MADE.key}),
        refusal({"authorization": f"Basic {MADE.key}"}),
        refusal({"x-api-key": MADE.key}),
        refusal(bearer("nonsense")),
        refusal(bearer(MADE.key.upper())),
        refusal(bearer(f"mlk-{key_id}-{other_secret}")),
        refusal(bearer(f"mlk-{'f' * 16}-{secret}")),
        refusal(bearer(MADE.key + "0")),
        refusal(bearer(MADE.key), {}),
        refusal(bearer(OTHER.key.replace(OTHER.record.key_id, key_id)), moved),
        refusal(bearer(f"mlk-{'0' * 16}-{'0' * 64}")),
    }
    assert len(answers) == 1


def test_every_wrong_key_costs_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look-up, one hash and one comparison in constant time, whatever is wrong."""
    work: list[str] = []

    def counted(name: str, function: object) -> object:
        def call(*arguments: object) -> object:
            work.append(name)
            return function(*arguments)  # type: ignore[operator]

        return call

    monkeypatch.setattr(identity, "hash_of", counted("hash", identity.hash_of))
    monkeypatch.setattr(identity.hmac, "compare_digest", counted("compare", identity.hmac.compare_digest))
    key_id, _ = split_key(MADE.key) or ("", "")
    for metadata in ({}, bearer("x"), bearer(f"mlk-{'f' * 16}-{'0' * 64}"), bearer(f"mlk-{key_id}-{'0' * 64}")):
        work.clear()
        looked_up: list[str] = []

        def look_up(key_id: str, looked_up: list[str] = looked_up) -> KeyRecord | None:
            looked_up.append(key_id)
            return RECORDS.get(key_id)

        with pytest.raises(Unauthenticated):
            known(metadata, look_up)
        assert (work, len(looked_up)) == (["hash", "compare"], 1)


@settings(deadline=None)
@given(st.integers(0, len(MADE.key) - 1), st.characters(codec="ascii"))
def test_one_wrong_character_is_enough(position: int, character: str) -> None:
    changed = MADE.key[:position] + character + MADE.key[position + 1 :]
    if changed != MADE.key:
        refusal(bearer(changed))


@settings(deadline=None)
@given(st.text(max_size=200) | st.text(st.sampled_from("mlkbearer -0123456789abcdefBM\t"), max_size=120))
def test_no_other_text_is_a_key(value: str) -> None:
    refusal({"authorization": value})
    refusal({"authorization": f"Bearer {value}"})


@pytest.mark.parametrize(
    ("tenant", "scopes", "name", "fields"),
    [
        ("acme", [], "", ["scopes"]),
        ("acme", ["gateway"], "", ["scopes"]),
        ("acme", ["generate", "operator"], "", ["scopes"]),
        ("", ["generate"], "", ["scopes"]),
        ("", ["root"], "", ["scopes"]),
        ("../x", ["generate"], "a\nb", ["tenant_id", "name"]),
        ("", ["operator"], "x" * 129, ["name"]),
        ("acme", ["audit:read"], "", ["scopes"]),
        ("acme", ["cluster-keys:write", "keys:write"], "", ["scopes"]),
    ],
)
def test_keys_that_are_not_made(tenant: str, scopes: list[str], name: str, fields: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        new_key(RNG.getrandbits, tenant_id=tenant, scopes=scopes, name=name, now_unix_s=0.0)
    assert [v.field for v in error.value.violations] == fields


@pytest.mark.parametrize(
    ("tenant", "scopes", "role", "told"),
    [
        ("acme", ["generate"], "admin", "role: goes not with scopes"),
        ("acme", [], "owner", "role: owner is for keys without a tenant"),
        ("", [], "admin", "role: admin is for keys that are bound to a tenant"),
        ("", [], "root", "role: 'root' is not one of owner, operator, viewer, billing, admin, generate"),
    ],
)
def test_roles_that_are_not_given(tenant: str, scopes: list[str], role: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        new_key(RNG.getrandbits, tenant_id=tenant, scopes=scopes, role=role, name="", now_unix_s=0.0)


def test_whom_a_call_may_be_about() -> None:
    operator = Principal("k", None, (Scope.OPERATOR,))
    admin = Principal("k", TenantId("acme"), (Scope.ADMIN,))
    assert operator.require_tenant("other") == "other"
    assert operator.require_tenant("") == ""
    assert admin.require_tenant("") == "acme"
    assert admin.require_tenant("acme") == "acme"
    with pytest.raises(PermissionDenied) as error:
        admin.require_tenant("other")
    assert error.value.message == "this key does not permit the call: it is for admin in tenant acme"
    for principal, held in (
        (Principal("k", None, (Scope.GATEWAY,)), "gateway in no tenant"),
        (Principal("k", TenantId("acme"), ()), "nothing in tenant acme"),
        (Principal("k", None, (), role=Role.VIEWER), "the role viewer in no tenant"),
    ):
        with pytest.raises(PermissionDenied) as error:
            principal.require(Scope.ADAPTERS_WRITE)
        assert error.value.message == f"this key does not permit the call: it is for {held}"


def test_a_keys_role_is_its_records() -> None:
    made = new_key(RNG.getrandbits, tenant_id="", scopes=[], role="viewer", name="", now_unix_s=5.0)
    principal = known(bearer(made.key), {made.record.key_id: made.record}.get)
    assert principal.role == "viewer"
    assert principal.may(Scope.METRICS_READ)
    assert not principal.may(Scope.TENANTS_WRITE)
    later = dataclasses.replace(made.record, role="auditor")
    assert not known(bearer(made.key), {later.key_id: later}.get).may(Scope.METRICS_READ)


def test_scopes_of_a_later_version_are_no_scopes_here() -> None:
    record = dataclasses.replace(MADE.record, scopes=("audit", "generate"))
    assert known(bearer(MADE.key), {record.key_id: record}.get).scopes == (Scope.GENERATE,)


def test_the_owner_is_told_what_is_wrong_and_nobody_else() -> None:
    made = new_key(
        RNG.getrandbits,
        tenant_id="acme",
        scopes=["generate"],
        name="",
        now_unix_s=5.0,
        lifetime_s=60.0,
        networks=["10.0.0.0/8", "2001:db8::/32"],
    )
    key_id, _ = split_key(made.key) or ("", "")
    records = {key_id: made.record}
    wrong = bearer(f"mlk-{key_id}-{'0' * 64}")
    stranger = refusal(wrong, {})
    for host in ("10.9.9.9", "2001:db8::7", None):
        assert known(bearer(made.key), records.get, 64.9, host).tenant_id == "acme"
    for host in ("11.0.0.1", "::1", "nowhere"):
        with pytest.raises(PermissionDenied, match=f"this key may not be used from {host}"):
            known(bearer(made.key), records.get, 64.9, host)
        assert refusal(wrong, records, host=host) == stranger
    assert "this key expired 1 s ago" in refusal(bearer(made.key), records, 66.0)[1]
    assert refusal(wrong, records, 66.0) == stranger
    revoked = {key_id: dataclasses.replace(made.record, revoked_unix_s=9.0)}
    assert refusal(bearer(made.key), revoked)[1] == "this key was revoked"
    assert refusal(wrong, revoked) == stranger


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:80", "10.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:80", "2001:db8::1"),
        ("ipv6:[::ffff:10.0.0.1]:80", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("unix:/run/x", "unix:/run/x"),
        ("", ""),
    ],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host


@pytest.mark.parametrize(
    "networks", [["10.0.0.1/8"], ["x"], ["10.0.0.0/33"], ["10.0.0.0/8"] + [f"10.{i}.0.0/16" for i in range(32)]]
)
@pytest.mark.parametrize("lifetime_s", [-1.0, float("nan"), float("inf")])
def test_ends_and_networks_that_are_none(networks: list[str], lifetime_s: float) -> None:
    with pytest.raises(InvalidRequest) as error:
        new_key(
            RNG.getrandbits,
            tenant_id="",
            scopes=["operator"],
            name="",
            now_unix_s=0.0,
            lifetime_s=lifetime_s,
            networks=networks,
        )
    assert [v.field for v in error.value.violations] == ["lifetime_s", "networks"]
