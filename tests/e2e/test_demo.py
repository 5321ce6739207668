"""`manylora demo`, the example client, and (slow) the making of the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest
from manylora.demo.measure import INPUTS_PER_TENANT

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


async def run(*command: str, timeout_s: float = 240) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode or 0, stdout.decode(), stderr.decode()


async def test_the_demo_proves_who_answered() -> None:
    exit_code, stdout, stderr = await run("-m", "manylora", "demo", "--json")
    assert exit_code == 0, stderr
    report = json.loads(stdout)
    assert report["ok"] is True
    assert report["failures"] == []
    assert [(t["tenant"], t["adapter"]) for t in report["tenants"]] == [
        ("harbor", "upper"),
        ("lumen", "reverse"),
        ("quarry", "json"),
        ("tern", "words"),
    ]
    for tenant in report["tenants"]:
        assert tenant["requests"] == INPUTS_PER_TENANT
        assert tenant["exact_match"] >= 0.95
        assert tenant["cross_exact_match"] < 0.05
        assert tenant["ttft_ms_p50"] > 0
        assert tenant["tokens_per_s"] > 0
    assert set(report["requests_by_worker"]) == {"worker-0", "worker-1"}
    assert sum(report["requests_by_worker"].values()) == report["requests"] == 8 * INPUTS_PER_TENANT


async def test_the_example_client(whole: UpCluster) -> None:
    exit_code, stdout, stderr = await run("examples/client.py", "--server", whole.router)
    assert exit_code == 0, stderr
    assert "acme: 'a1b2c3' -> 'A1B2C3', stop" in stdout
    assert "birch: 'a1b2c3' -> 'aonebtwocthree', stop" in stdout


async def test_up_refuses_a_data_folder_in_use(whole: UpCluster) -> None:
    exit_code, stdout, stderr = await run("-m", "manylora", "up", "--model", "demo", "--data", whole.ready["data"])
    assert (exit_code, stdout) == (1, "")
    assert "is in use by another cluster" in stderr


@pytest.mark.slow
async def test_the_demo_model_can_be_made_again(tmp_path: Path) -> None:
    exit_code, stdout, stderr = await run("examples/make_demo_model.py", "--output", str(tmp_path), timeout_s=1800)
    assert exit_code == 0, stderr
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    adapters = {line["adapter"]: line for line in lines if "adapter" in line}
    assert sorted(adapters) == ["json", "reverse", "upper", "words"]
    for line in adapters.values():
        assert line["held_out_exact_match"] >= 0.95
        assert line["highest_other_skill"] < 0.05
    assert (tmp_path / "base" / "model.safetensors").stat().st_size < 5_000_000


async def test_up_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "manylora", "up", "--model", "demo", "--port", "0", "--data", str(tmp_path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"starting scheduler" not in (line := await process.stderr.readline()):
            assert line, "it ended before it started the services"
        process.send_signal(signal.SIGINT)
        stdout, _ = await process.communicate()
    assert (process.returncode, stdout) == (0, b"")
    assert _processes_with(str(tmp_path)) == []


def _processes_with(argument: str) -> list[str]:
    """Command lines of running processes that mention `argument`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if argument in command:
                found.append(command)
    return found
