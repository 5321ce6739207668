"""`manylora audit`: what is told of a log that is whole, and of one that is not."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from manylora_shared.audit.verify import Segment

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter
from tests.shared.audit_chains import CHAIN, OTHER, SIGNER, chain


@pytest.fixture
def segments(router: FakeRouter) -> list[Segment]:
    found, head = chain(random.Random(3), 9, num_segments=2)
    router.audit_segments, router.audit_heads = list(found), [head]
    return router.audit_segments


async def test_a_log_that_is_whole(manylora: Manylora, segments: list[Segment], tmp_path: Path) -> None:
    out = await manylora("audit", "verify")
    assert (out.exit_code, out.stdout) == (0, f"chain {CHAIN}: 9 entries, as written\n" + out.stdout.partition("\n")[2])
    out = await manylora("audit", "verify", "--json")
    assert out.json["is_whole"]
    assert out.json["chains"][0]["entries"] == 9
    folder = tmp_path / "copy"
    out = await manylora("audit", "export", str(folder))
    assert (out.exit_code, out.stdout) == (0, f"{folder}: 2 segments of 1 chains\n")
    assert (await manylora("audit", "export", str(folder))).exit_code == 2, "it is not empty"
    (tmp_path / "key.pub").write_text(SIGNER.public_key)
    (tmp_path / "other.pub").write_text(OTHER.public_key)
    verify = ["audit", "verify", str(folder), "--server", "127.0.0.1:1"]
    assert (await manylora(*verify)).exit_code == 0, "no cluster is asked"
    assert (await manylora(*verify, "--public-key", str(tmp_path / "key.pub"))).exit_code == 0
    assert (await manylora(*verify, "--public-key", str(tmp_path / "other.pub"))).exit_code == 1
    assert (await manylora(*verify, "--public-key", str(folder / "heads.json"))).exit_code == 2
    (folder / "heads.json").unlink()
    out = await manylora(*verify)
    assert out.exit_code == 0
    assert "there is no heads.json: what was cut off at a chain's end cannot be seen" in out.stdout


async def test_a_log_that_is_not(
    manylora: Manylora, router: FakeRouter, segments: list[Segment], tmp_path: Path
) -> None:
    await manylora("audit", "export", str(tmp_path / "copy"))
    last = segments[-1]
    segments[-1] = dataclasses.replace(last, data=last.data[:-1].replace(b'"seq":9', b'"seq":8') + b"\n")
    out = await manylora("audit", "verify")
    assert out.exit_code == 1
    assert out.stdout.startswith(f"chain {CHAIN}: 9 entries, WRONG\n  {last.name}:")
    file = tmp_path / "copy" / last.name
    file.write_bytes(file.read_bytes()[:-30])
    out = await manylora("audit", "verify", str(tmp_path / "copy"))
    assert out.exit_code == 1
    assert "it counts 9 entries and signs the last of them: it is gone" in out.stdout
    (tmp_path / "copy" / "heads.json").write_text("{}")
    assert (await manylora("audit", "verify", str(tmp_path / "copy"))).exit_code == 2


async def test_a_router_that_did_not_answer(manylora: Manylora, router: FakeRouter, segments: list[Segment]) -> None:
    router.silent_router_ids = ["router-1"]
    out = await manylora("audit", "verify")
    assert out.exit_code == 1
    assert "router-1 did not answer: what it has is not looked at" in out.stdout
    assert (await manylora("audit", "verify", "--json")).json["silent_routers"] == ["router-1"]


async def test_the_last_entries(manylora: Manylora, router: FakeRouter, segments: list[Segment]) -> None:
    out = await manylora("audit", "tail", "-n", "3", "--json")
    assert len(out.json["entries"]) == 3
    times = [entry["at_unix_s"] for entry in out.json["entries"]]
    assert times == sorted(times)
    out = await manylora("audit", "tail")
    assert "outcome" in out.stdout
    assert json.dumps(SIGNER.public_key)[1:9] in out.stdout, "the chain's first entry"
    router.audit_segments, router.audit_heads = [], []
    assert "the audit log has no entries" in (await manylora("audit", "tail")).stderr
    assert "there is no audit log" in (await manylora("audit", "verify")).stderr
