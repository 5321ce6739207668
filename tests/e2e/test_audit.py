"""Who did what in a running cluster, through the end of a router; and a key with a limit of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from manylora.demo import skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e


async def test_the_log_tells_who_made_a_key_and_goes_on_after_a_kill(whole: UpCluster) -> None:
    made = await whole.manylora("key", "create", "--tenant", "acme", "--tokens-per-min", "5", "--json")
    key, key_id = made.json["key"], made.json["key_id"]
    out = await whole.manylora("generate", "--key", key, skills.prompt("a bridge"), "--json")
    assert out.json["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert "key.tokens_per_min: " in out.json["error"]["message"]
    assert key_id in out.json["error"]["message"]
    denied = await whole.manylora("key", "list", "--key", key)
    assert "PERMISSION_DENIED" in denied.stderr
    whole.kill("router-0")
    await whole.wait_complete()
    assert (await whole.manylora("key", "revoke", key_id)).exit_code == 0
    entries = (await whole.manylora("audit", "tail", "-n", "100", "--json")).json["entries"]
    told = [(e["action"], e["outcome"]) for e in entries if key_id in (e["target"].removeprefix("key "), e["who"])]
    acts = [each for each in told if each[1] != "done"]
    assert acts == [
        ("AdminService/CreateKey", "intent"),
        ("AdminService/ListKeys", "denied"),
        ("AdminService/RevokeKey", "intent"),
    ]
    assert key.rpartition("-")[2] not in str(entries)
    assert (await whole.manylora("audit", "verify")).exit_code == 0
    folder = Path(whole.ready["data"]) / "audit"
    files = await asyncio.to_thread(lambda: [path.stat().st_mode & 0o077 for path in folder.iterdir()])
    assert files
    assert set(files) == {0}
