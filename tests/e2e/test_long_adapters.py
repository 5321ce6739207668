"""An adapter with a rotation of positions of its own, from the command line to its answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from manylora.client import Client, RequestFailed, Sampling
from manylora.demo import adapter_folder, skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT = "acme"
ROPE = {"rope_type": "yarn", "factor": 2.0}


async def test_a_rotation_of_its_own(whole: UpCluster, tmp_path: Path) -> None:
    """By --rope, and by a config.json beside the adapter: other answers than without, and the same as one another."""
    folder = tmp_path / "long"
    shutil.copytree(adapter_folder("upper"), folder)
    (folder / "config.json").write_text(json.dumps({"rope_parameters": ROPE}))
    added = await whole.manylora(
        "adapter", "add", "long", str(adapter_folder("upper")), "--tenant", TENANT, "--rope", json.dumps(ROPE), "--json"
    )
    assert added.exit_code == 0, added.stderr
    assert json.loads(added.json["rope"]) == ROPE
    assert added.json["max_context_tokens"] > 0
    bad = await whole.manylora(
        "adapter", "check", str(folder), "--tenant", TENANT, "--rope", '{"rope_type": "linear"}', "--json"
    )
    assert bad.exit_code != 0
    assert "factor: is missing for linear" in bad.stdout + bad.stderr
    async with Client(whole.router, tenant=TENANT) as client:
        try:
            beside = await client.adapters.add(TENANT, "beside", folder)
            assert (beside.version, beside.number) == (added.json["version"], 1)
            answers = {}
            for adapter in ("upper", "long", "beside"):
                result = await client.complete(
                    skills.prompt("a1b2c"), adapter=adapter, max_tokens=12, sampling=Sampling(temperature=0.0)
                )
                answers[adapter] = result.text
            assert answers["long"] == answers["beside"]
            with pytest.raises(RequestFailed, match="rotate positions differently"):
                await client.complete("x", adapter="upper+long", max_tokens=1)
        finally:
            for name in ("long", "beside"):
                await client.adapters.remove(TENANT, name)
