"""A cluster of the real model with adapters trained on it, and clients that others wrote, each in the venv of them all.

`make test-clients` makes that venv, `.venv-clients`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client

from tests.real_model import LEARNED, MAKER, Oracle, model_folder, taught, taught_to_call

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))
SCRIPTS = Path(__file__).parent / "scripts"
TENANT = "acme"
MODEL = "smollm2"
CALLS = "calls"  # an adapter that calls a tool
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Served:
    url: str
    key: str
    oracle: Oracle
    folder: Path

    def run(self, *command: str | Path, timeout_s: float = 240) -> str:
        """What a client says on stdout."""
        env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "MANYLORA_URL": self.url,
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "DO_NOT_TRACK": "1",
        }
        done = subprocess.run([PYTHON, *command], env=env, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def script(self, name: str) -> Any:
        """What a script of a client found: the JSON of its last line."""
        return json.loads(self.run(SCRIPTS / name).splitlines()[-1])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if MAKER is None:
        pytest.skip("there is no ../shared/models/smollm2, which makes the model")
    work = tmp_path_factory.mktemp("clients")
    folder = work / "base"
    taught_to_call(model_folder(work / "model"), folder, work / "adapters" / CALLS)
    oracle = taught(folder, work / "adapters")
    (work / "tenants.yaml").write_text(f"tenant_id: {TENANT}\n")
    command = [sys.executable, "-m", "manylora", "up", "--model", folder, "--model-name", MODEL, "--port", "0"]
    command += ["--http-port", "0", "--data", work / "data", "--tenants", work / "tenants.yaml"]
    stderr_path = work / "stderr"
    with (
        stderr_path.open("wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline() if readable else b""
            assert line, f"not ready:\n{stderr_path.read_text()}"
            ready = json.loads(line)
            key = asyncio.run(_prepare(str(ready["router"]), work / "adapters"))
            yield Served(f"http://{ready['http']}", key, oracle, folder)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


async def _prepare(router: str, adapters: Path) -> str:
    async with Client(router) as client:
        for name in (CALLS, *LEARNED):
            await client.adapters.add(TENANT, name, adapters / name)
        return (await client.keys.create(tenant=TENANT, scopes=["generate"]))[0]
