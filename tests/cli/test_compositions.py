"""`adapter compose`: one name in a tenant's policy, and the rest of it as it was."""

from __future__ import annotations

from pathlib import Path

from manylora_shared.tenancy.policy import parse_policy

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter

POLICY = "tenant_id: acme\nquotas: {concurrency: 7}\nadapters: {pin: [a], compose: {old: a+c}}\n"


async def test_a_name_is_given_replaced_and_taken(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "acme.yaml").write_text(POLICY)
    assert (await manylora("tenant", "apply", str(tmp_path / "acme.yaml"))).exit_code == 0
    out = await manylora("adapter", "compose", "both", "a+b:0.50", "--tenant", "acme")
    assert (out.exit_code, out.stdout) == (0, "both: a+b:0.5\n")
    assert "acme has no adapter 'b': requests with both fail until it is added" in out.stderr
    policy = parse_policy(router.tenants["acme"][0])
    assert policy.compositions == {"old": "a+c", "both": "a+b:0.5"}
    assert (policy.pinned_adapters, policy.quotas.concurrency) == (("a",), 7)
    out = await manylora("adapter", "compose", "both", "b", "--tenant", "acme", "--json")
    assert out.json == {"tenant_id": "acme", "name": "both", "parts": "b", "policy_version": 3}
    assert (await manylora("adapter", "compose", "old", "--tenant", "acme")).stdout == "old: removed\n"
    assert parse_policy(router.tenants["acme"][0]).compositions == {"both": "b"}


async def test_what_makes_no_sense_changes_nothing(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "acme.yaml").write_text(POLICY)
    await manylora("tenant", "apply", str(tmp_path / "acme.yaml"))
    for arguments, said in (
        (("A b", "a"), "A b"),
        (("both", "a+a"), "names 'a' twice"),
        (("both", "a:0"), "a weight is a decimal number"),
        (("none",), "has no composition 'none'"),
    ):
        out = await manylora("adapter", "compose", *arguments, "--tenant", "acme")
        assert out.exit_code == 2
        assert said in out.stderr
    assert router.tenants["acme"] == (POLICY, 1)
