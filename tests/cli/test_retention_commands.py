"""`retention`: what is kept of end users, as a tenant exports and erases it."""

from __future__ import annotations

import json

from manylora.v1 import data_pb2

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_export_and_erase(manylora: Manylora, router: FakeRouter) -> None:
    router.kept = [
        data_pb2.ExportTextsResponse(request_id=str(i), user=user, prompt="p", answers=["a", "b"], whole=True)
        for i, user in enumerate(("ann", "bob", "ann"))
    ]
    out = await manylora("retention", "export", "--user", "ann", "--tenant", "acme")
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    assert [(line["request_id"], line["answers"]) for line in lines] == [("0", ["a", "b"]), ("2", ["a", "b"])]
    assert "2 texts" in out.stderr
    assert len((await manylora("retention", "export")).stdout.splitlines()) == 3
    assert (await manylora("retention", "erase", "--user", "ann")).stdout == "2 texts are erased\n"
    assert (await manylora("retention", "erase", "--user", "ann", "--json")).json == {"erased": 0}
    assert (await manylora("retention", "erase")).exit_code == 2
