"""`manylora adapter compose`: one name in a tenant's policy, which nobody else changes meanwhile."""

from __future__ import annotations

from dataclasses import replace

from manylora_shared.adapter_reference import ReferenceProblem, format_reference, parse_reference
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterName, name_problem
from manylora_shared.tenancy.policy import parse_policy

from manylora.cli.output import Target, print_json, say, usage_error, write


async def compose(target: Target, tenant: str, name: str, parts: str, *, as_json: bool) -> None:
    if problem := name_problem(name):
        raise usage_error(f"{name!r} {problem}")
    try:
        written = format_reference(parse_reference(parts)) if parts else ""
    except ReferenceProblem as refused:
        raise usage_error(str(refused)) from None
    async with target.client() as client:
        info = await client.tenants.get(tenant)
        try:
            policy = parse_policy(info.policy_yaml)
        except InvalidRequest as e:
            raise usage_error(f"this version cannot read the policy of {tenant}: {e.message}") from None
        compositions = {each: of for each, of in policy.compositions.items() if each != name}
        if not written and len(compositions) == len(policy.compositions):
            raise usage_error(f"{tenant} has no composition {name!r}")
        if written:
            compositions[AdapterName(name)] = written
        changed = replace(policy, compositions=compositions)
        known = {each.name for each in await client.adapters.list(tenant)} if written else set()
        _, version = await client.tenants.apply(changed.to_yaml(), expected_version=info.version)
        for part in parse_reference(parts) if written else ():
            if part.name not in known:
                say(f"{tenant} has no adapter {part.name!r}: requests with {name} fail until it is added")
    if as_json:
        print_json({"tenant_id": tenant, "name": name, "parts": written, "policy_version": version})
    else:
        write(f"{name}: {written or 'removed'}\n")
