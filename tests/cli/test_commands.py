"""Commands in their own process, against a fake router: how they start, and what is wrong usage."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_it_starts_as_a_module_too(address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "manylora", "generate", "--json", "--server", address, "one two"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert (process.returncode, json.loads(stdout)["text"], stderr) == (0, "ONE TWO", b"ONE TWO\n")


async def test_no_server_is_a_failed_request(manylora: Manylora, nobody: str) -> None:
    out = await manylora("status", "--json", "--server", nobody)
    assert out.exit_code == 1
    assert out.json["error"]["code"] == "UNAVAILABLE"
    assert f"nothing answers at {nobody}; is `manylora up` running?" in out.stderr


async def test_it_tells_its_version(manylora: Manylora) -> None:
    out = await manylora("--version")
    assert (out.exit_code, out.stdout) == (0, f"manylora {importlib.metadata.version('manylora')}\n")


async def test_a_cluster_is_not_started_for_policies_that_will_be_refused(manylora: Manylora, tmp_path: Path) -> None:
    file, data = tmp_path / "tenants.yaml", tmp_path / "data"
    file.write_text("tenant_id: acme\n---\ntenant_id: birch\nclasses: {batch: {weight: 0}}\nowner: me\n")
    out = await manylora("up", "--model", "demo", "--port", "0", "--data", str(data), "--tenants", str(file))
    assert (out.exit_code, out.stdout) == (1, "")
    told = out.stderr.splitlines()
    assert told[0] == f"INVALID_ARGUMENT: {file}: 2 errors"
    assert [line.split(":")[:2] for line in told[1:]] == [["  classes.batch.weight", " line 4"], ["  owner", " line 5"]]
    assert not data.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "--tenant", "a"),
        ("generate", "--tenant", "a", "hello", "--token-ids", "1"),
        ("generate", "--tenant", "a", "--token-ids", "1,x"),
        ("generate", "--tenant", "a", "--token-ids", "1,,2"),
        ("generate", "--tenant", "a", "--token-ids", "4294967296"),
        ("generate", "--tenant", "a", "hello", "--max-tokens", "-1"),
        ("generate", "--tenant", "a", "hello", "--class", "gold"),
        ("generate", "--tenant", "a", "hello", "--seed", "-3"),
        ("adapter", "add", "x", "folder"),
        ("tenant", "apply", "no-such-file.yaml"),
        ("up",),
        ("up", "--model", "no-such-folder"),
        ("up", "--model", "demo", "--workers", "0"),
        ("up", "--model", "demo", "--tenants", "no-such-file.yaml"),
        ("no-such-command",),
    ],
)
async def test_wrong_usage_is_exit_code_2(manylora: Manylora, router: FakeRouter, arguments: tuple[str, ...]) -> None:
    out = await manylora(*arguments)
    assert (out.exit_code, out.stdout) == (2, "")
    assert "Error" in out.stderr
    assert router.requests == []
