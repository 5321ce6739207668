"""`encryption`: what an operator sees and changes of the sealing of stores."""

from __future__ import annotations

from manylora.v1 import data_pb2

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_status_and_rotation(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("encryption", "status")
    assert out.exit_code == 0
    assert "wrapped by local-2" in out.stdout
    assert "local-1" in out.stdout
    assert (await manylora("encryption", "status", "--json")).json["data_keys"] == {"local-1": 1, "local-2": 3}
    router.is_sealing = False
    assert "nothing is sealed" in (await manylora("encryption", "status")).stdout
    out = await manylora("encryption", "rotate")
    assert out.stdout == "4 data keys are wrapped by local-3\n"
    assert "still opens" in out.stderr
    assert (await manylora("encryption", "rotate", "--json")).json["rewrapped"] == 4


async def test_sealing_what_lies_in_the_clear(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("encryption", "seal")
    assert (out.exit_code, out.stdout) == (0, "")
    assert "nothing lay in the clear" in out.stderr
    router.sealed = [
        data_pb2.SealStoresResponse(tenant_id="acme", what="adapter a@1"),
        data_pb2.SealStoresResponse(tenant_id="birch", what="samples/golden", problem="it is gone"),
    ]
    out = await manylora("encryption", "seal")
    assert (out.exit_code, out.stdout) == (1, "acme: adapter a@1: sealed\nbirch: samples/golden: it is gone\n")
    out = await manylora("encryption", "seal", "--tenant", "acme", "--json")
    assert (out.exit_code, len(out.json["items"])) == (0, 1)
