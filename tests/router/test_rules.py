"""Every RPC and every route, asked for with a key of every role: the documents' matrix is what the router does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from http_fakes import http_front, request_bytes
from manylora.v1 import admin_pb2, data_pb2, inference_pb2
from manylora_router.front.http import routes
from manylora_router.guard import rules
from manylora_router.guard.rules import ROUTES, RPCS, Rule
from manylora_shared.errors import Code, PermissionDenied, RpcError
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.roles import TENANT_ROLES, Role, Scope
from manylora_shared.transport.base import Method, methods_of
from router_fakes import KeyedChannel, RouterCluster, simulate, until

API = Path(__file__).resolve().parents[2] / "docs" / "API.md"
SERVICES: list[ServiceDescriptor] = [
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    data_pb2.DESCRIPTOR.services_by_name["DataService"],
]
METHODS: dict[str, Method] = {
    f"{service.name}/{name}": method for service in SERVICES for name, method in methods_of(service).items()
}
OLD_SCOPES = {  # of keys that were made before there were roles: what they permitted then, by name
    "generate": "Generate ListModels GiveFeedback ListAdapters GetAdapterLine GetStatus",
    "admin": "GetTenant AddAdapter CheckAdapter ListAdapters RemoveAdapter VerifyAdapters GetAdapterReport ReadAdapter"
    " PutSamples ListSamples RemoveSamples RolloutAdapter PromoteAdapter RollbackAdapter RetireAdapter GetAdapterLine"
    " GetStatus",
    "gateway": "Generate ListModels GiveFeedback",
}


def documented() -> dict[str, set[str]]:
    """The roles that may, by RPC and route, as the documents have it."""
    found: dict[str, set[str]] = {}
    for line in API.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(Role) and cells[2] in ("all", "-"):
            may = {role.value for role, cell in zip(Role, cells[2:], strict=True) if cell in ("all", "own")}
            for name in re.findall("`([^`]+)`", cells[1]):
                found[name] = may
    return found


def matrix() -> str:
    """The documents' table, of the code's."""
    rows: dict[tuple[tuple[Scope, ...], bool], list[str]] = {}
    for name, rule in [*((n.partition("/")[2], r) for n, r in RPCS.items()), *ROUTES.items()]:
        if not rule.is_open:
            rows.setdefault((rule.scopes, rule.is_clusters), []).append(name)
    lines = [f"| scope | calls | {' | '.join(Role)} |", "|---" * (2 + len(Role)) + "|"]
    for (scopes, is_clusters), names in rows.items():
        cells = [_cell(Rule(scopes, is_clusters=is_clusters), role) for role in Role]
        scope = " or ".join(f"`{each}`" for each in scopes)
        lines.append(f"| {scope} | {', '.join(f'`{each}`' for each in names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rule: Rule, role: Role) -> str:
    tenant = "acme" if role in TENANT_ROLES else None
    if not rule.permits(Principal("", tenant, (), role=role)):  # type: ignore[arg-type]
        return "-"
    return "own" if tenant else "all"


def test_every_rpc_and_every_route_has_a_rule() -> None:
    assert set(RPCS) == set(METHODS), "a call without a rule is open to nobody"
    assert set(ROUTES) == set(routes.names())


def test_the_documents_have_the_matrix() -> None:
    assert matrix() in API.read_text(), f"docs/API.md must have\n\n{matrix()}"


def test_what_has_no_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: rule for name, rule in RPCS.items() if name != "AdminService/GetStatus"}
    monkeypatch.setattr(rules, "RPCS", left)

    async def test(cluster: RouterCluster) -> None:
        assert await ask(cluster.client, "AdminService/GetStatus") is Code.PERMISSION_DENIED

    simulate(test)
    with pytest.raises(PermissionDenied, match="GET /health is open to nobody"):
        rules.check({}, "GET /health")


async def test_a_route_that_has_no_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ROUTES", {})
    async with http_front() as front:
        for path in ("/health", "/v1/models"):
            asked = request_bytes(path, b"", front.key).replace(b"POST", b"GET", 1)
            assert (await front.raw(asked, until_closed=False)).startswith(b"HTTP/1.1 403 ")


async def ask(channel: KeyedChannel, name: str, *, tenant: str = "", about: str = "") -> Code:
    """With an empty request: who may is told what is wrong with it, and changes nothing."""
    method = METHODS[name]
    metadata = {"x-tenant-id": tenant} if tenant and name.startswith("Inference") else {}
    request = method.request_type()
    if about and "tenant_id" in method.request_type.DESCRIPTOR.fields_by_name:
        request.tenant_id = about  # type: ignore[attr-defined]
    try:
        if method.client_streaming:
            stream = channel.stream(method, metadata=metadata)
            header = admin_pb2.AddAdapterHeader(tenant_id=about)
            await stream.write(method.request_type(header=header))
            await stream.close_send()
            await stream.read()
        elif method.server_streaming:
            await channel.stream(method, request, metadata=metadata).read()
        else:
            await channel.call(method, request, metadata=metadata)
    except RpcError as e:
        return e.code
    return Code.OK


def expectations() -> Iterator[tuple[Role, str, bool]]:
    told = documented()
    for name in METHODS:
        for role in Role:
            yield role, name, role in told[name.partition("/")[2]]


def test_every_rpc_by_every_role() -> None:
    async def test(cluster: RouterCluster) -> None:
        channels = {role: cluster.caller(await cluster.put_role(role)) for role in Role}
        await until(lambda: len(cluster.app.directory.api_keys) == 1 + len(Role))
        wrong = []
        for role, name, may in expectations():
            code = await ask(channels[role], name, tenant="acme")
            assert code is not Code.UNAUTHENTICATED
            if (code is not Code.PERMISSION_DENIED) != may:
                wrong.append(f"{role} {name}: {code.name}")
            if role in TENANT_ROLES and "tenant_id" in METHODS[name].request_type.DESCRIPTOR.fields_by_name:
                for other in ("other", "nobody"):
                    foreign = await ask(channels[role], name, about=other)
                    if foreign is not Code.PERMISSION_DENIED:
                        wrong.append(f"{role} {name} of {other}: {foreign.name}")
        assert wrong == []

    simulate(test)


def test_keys_of_before_roles_may_what_they_might() -> None:
    async def test(cluster: RouterCluster) -> None:
        operators = {name for name in METHODS if not name.startswith("InferenceService/")}
        for scope, names in {**OLD_SCOPES, "operator": " ".join(n.partition("/")[2] for n in operators)}.items():
            tenant = "acme" if scope in ("generate", "admin") else ""
            key = await cluster.put_key(tenant=tenant, scopes=(scope,))
            await until(lambda key=key: key[4:20] in cluster.app.directory.api_keys)
            channel = cluster.caller(key)
            may = {
                name.partition("/")[2]
                for name in METHODS
                if await ask(channel, name, tenant="acme") is not Code.PERMISSION_DENIED
            }
            later = {"admin": {"GetUsage"}}.get(scope, set())  # what such a key may besides, of calls that came later
            assert may - later == set(names.split()), scope

    simulate(test)


async def test_every_route_by_every_role() -> None:
    told = documented()
    async with http_front() as front:
        known = len(front.cluster.app.directory.api_keys)
        keys: Mapping[Role, str] = {role: await front.cluster.put_role(role) for role in Role}
        await until(lambda: len(front.cluster.app.directory.api_keys) == known + len(Role))
        wrong = []
        for name, rule in ROUTES.items():
            method, path = name.split()
            for role, key in [*keys.items(), (None, "")]:
                data = request_bytes(path + "x" * path.endswith("/"), b"{}", key, "x-tenant-id: acme")
                answer = await front.raw(data.replace(b"POST", method.encode(), 1), until_closed=False)
                status = int(answer.split()[1])
                if role is None:
                    expected = status != 401 if rule.is_open else status == 401
                else:
                    expected = (status != 403) == (rule.is_open or role in told[name])
                if not expected:
                    wrong.append(f"{role} {name}: {status}")
        assert wrong == []
