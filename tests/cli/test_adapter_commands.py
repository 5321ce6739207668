"""`adapter rollout`, `promote`, `rollback`, `retire`, `history`: what is sent, and what is shown."""

from __future__ import annotations

import pytest
from manylora.v1 import admin_pb2

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter

SHOWN = "up: version 1 is in force, version 2 gets 10 % by user\n"


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (
            ["rollout", "up", "--to", "2", "--percent", "10", "--sticky", "user"],
            admin_pb2.RolloutAdapterRequest(tenant_id="acme", name="up", to=2, percent=10, sticky="user"),
        ),
        (["promote", "up"], admin_pb2.PromoteAdapterRequest(tenant_id="acme", name="up")),
        (["promote", "up", "--to", "3"], admin_pb2.PromoteAdapterRequest(tenant_id="acme", name="up", to=3)),
        (["rollback", "up"], admin_pb2.RollbackAdapterRequest(tenant_id="acme", name="up")),
        (["retire", "up", "3"], admin_pb2.RetireAdapterRequest(tenant_id="acme", name="up", number=3)),
    ],
)
async def test_changes_are_sent_and_the_line_is_shown(
    manylora: Manylora, router: FakeRouter, words: list[str], sent: object
) -> None:
    out = await manylora("adapter", *words, "--tenant", "acme")
    assert (out.exit_code, out.stdout, router.line_changes) == (0, SHOWN, [sent])
    out = await manylora("adapter", *words, "--tenant", "acme", "--json")
    assert (out.json["in_force"], out.json["rollout"]) == (1, {"to": 2, "percent": 10, "sticky": "user"})


async def test_a_share_beyond_all_is_a_mistake(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("adapter", "rollout", "up", "--to", "2", "--percent", "101", "--tenant", "acme")
    assert (out.exit_code, router.line_changes) == (2, [])
