"""The config.json of a base model, and its generation_config.json."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from manylora_worker.models.checkpoint import (
    ModelRefused,
    checked_config,
    max_context_tokens,
    sampling_defaults,
    take_long_factors,
)

from tests.fuzz.harness import Harness

_FOLDER = Path(tempfile.mkdtemp(prefix="manylora-fuzz-"))
(_FOLDER / "model.safetensors").touch()
logging.getLogger("transformers").setLevel(logging.CRITICAL)


def run(data: bytes) -> None:
    for name in ("config.json", "generation_config.json"):
        (_FOLDER / name).write_bytes(data)
    assert all(isinstance(value, int | float) for value in sampling_defaults(_FOLDER).values())
    config = checked_config(_FOLDER, "none", "cpu")
    assert max_context_tokens(config.get_text_config()) >= 1
    take_long_factors(config.get_text_config(), 1 << 20)
    assert max_context_tokens(config.get_text_config()) >= 1


HARNESS = Harness(run, documented=(ModelRefused,), is_json=True)
