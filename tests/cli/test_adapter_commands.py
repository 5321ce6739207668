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
    rollout = {"to": 2, "percent": 10, "sticky": "user", "auto": None, "progress": None}
    assert (out.json["in_force"], out.json["rollout"]) == (1, rollout)


async def test_a_rollout_that_judges_itself(manylora: Manylora, router: FakeRouter) -> None:
    words = ["adapter", "rollout", "up", "--to", "2", "--auto", "--tenant", "acme"]
    out = await manylora(*words)
    plain = admin_pb2.RolloutAdapterRequest(
        tenant_id="acme", name="up", to=2, sticky="request", auto=admin_pb2.AutoRollout()
    )
    assert (out.exit_code, router.line_changes) == (0, [plain])
    out = await manylora(*words, "--steps", "5, 50", "--min-requests", "30", "--step-hours", "0.5")
    plain.auto.CopyFrom(admin_pb2.AutoRollout(steps=[5, 50], min_requests=30, step_limit_s=1800))
    assert (out.exit_code, router.line_changes[1]) == (0, plain)
    assert out.stdout == SHOWN.replace("\n", ", and by itself 5 > 50 > 100 %\n")


@pytest.mark.parametrize(
    "options",
    [[], ["--auto", "--percent", "5"], ["--percent", "5", "--steps", "1"], ["--auto", "--steps", "1,x"]],
)
async def test_how_a_rollout_grows_is_said_once(manylora: Manylora, router: FakeRouter, options: list[str]) -> None:
    out = await manylora("adapter", "rollout", "up", "--to", "2", "--tenant", "acme", *options)
    assert (out.exit_code, router.line_changes) == (2, [])


@pytest.mark.parametrize(
    "words",
    [
        *(["promote", "up", "--to", number] for number in ("-1", "4294967296", "9" * 400)),
        *(["retire", "up", number] for number in ("0", "4294967296")),
        *(["rollout", "up", "--to", number, "--auto"] for number in ("0", "4294967296")),
        *(["rollout", "up", "--to", "2", "--auto", "--min-requests", number] for number in ("-1", "4294967296")),
        *(["rollout", "up", "--to", "2", "--auto", "--steps", steps] for steps in ("101", "1,4294967296", "9" * 5000)),
        *(["rollout", "up", "--to", "2", "--auto", "--step-hours", number] for number in ("nan", "inf")),
    ],
)
async def test_a_number_that_its_field_does_not_hold_is_a_mistake(
    manylora: Manylora, router: FakeRouter, words: list[str]
) -> None:
    out = await manylora("adapter", *words, "--tenant", "acme")
    assert (out.exit_code, out.stdout, router.line_changes) == (2, "", [])
    said = " ".join(out.stderr.split())
    assert any(name in said for name in ("--to", "--min-requests", "--steps", "--step-hours", "NUMBER", "{number}")), (
        said
    )


async def test_a_share_beyond_all_is_a_mistake(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("adapter", "rollout", "up", "--to", "2", "--percent", "101", "--tenant", "acme")
    assert (out.exit_code, router.line_changes) == (2, [])
