"""NVIDIA's aiperf, in a venv of its own (its pins contradict the other clients'): a load whose every answer counts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import MODEL, ROOT, Served

pytestmark = pytest.mark.clients

AIPERF = Path(os.environ.get("AIPERF", ROOT / ".venv-aiperf/bin/aiperf"))
REQUESTS = 12


@pytest.mark.parametrize(("endpoint", "model"), [("completions", MODEL), ("chat", "shout")])
def test_a_load_of_aiperf_s(served: Served, tmp_path: Path, endpoint: str, model: str) -> None:
    command = [AIPERF, "profile", "--model", model, "--url", served.url, "--endpoint-type", endpoint, "--streaming"]
    command += ["--tokenizer", served.folder, "--api-key", served.key, "--concurrency", "4"]
    command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run(
        [*command, "--artifact-dir", tmp_path], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert "error_request_count" not in found or found["error_request_count"]["avg"] == 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(8)
    assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"]
