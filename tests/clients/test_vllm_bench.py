"""`vllm bench serve --lora-modules`, vLLM's own load, in a venv of its own: each answer is its adapter's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import MODEL, ROOT, Served

from tests.real_model import CAPITAL, LEARNED, MAX_TOKENS

pytestmark = pytest.mark.clients

VLLM = Path(os.environ.get("VLLM_BENCH", ROOT / ".venv-vllm/bin/vllm"))
REQUESTS = 6


def test_a_load_of_vllms_over_adapters(served: Served, tmp_path: Path) -> None:
    prompt = served.oracle.tokenizer.decode(served.oracle.rendered(CAPITAL, add_generation_prompt=True))
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * REQUESTS)
    command = [VLLM, "bench", "serve", "--backend", "openai", "--base-url", served.url, "--model", MODEL]
    command += ["--tokenizer", served.folder, "--dataset-name", "custom", "--dataset-path", tmp_path / "prompts.jsonl"]
    command += ["--skip-chat-template", "--custom-output-len", str(MAX_TOKENS), "--num-prompts", str(REQUESTS)]
    command += ["--lora-modules", *LEARNED, "--lora-assignment", "round-robin", "--temperature", "0"]
    command += ["--max-concurrency", "3", "--save-result", "--save-detailed", "--result-filename", tmp_path / "result"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OPENAI_API_KEY": served.key, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "result").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert found["generated_texts"] == list(LEARNED.values()) * (REQUESTS // len(LEARNED))
    assert 0 < found["mean_ttft_ms"] < 1000 * found["duration"]
