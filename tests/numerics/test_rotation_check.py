"""The check of rotations, as readers of adapters have it."""

from __future__ import annotations

import pickle
import subprocess
import sys

from manylora_shared.stores.adapter_rope import RopeScaling
from manylora_worker.models.decoder.rotation_check import RotationCheck
from transformers import LlamaConfig

CHECK = RotationCheck(pickle.dumps(LlamaConfig(max_position_embeddings=64)))


def test_what_can_be_computed_has_no_problem() -> None:
    assert CHECK(RopeScaling((("factor", 2.0), ("rope_type", "yarn")), 128)) == ""
    assert "ZeroDivisionError" in CHECK(RopeScaling((("factor", 2.0), ("rope_theta", 1.0), ("rope_type", "yarn")), 128))


def test_a_reader_has_it_without_transformers() -> None:
    script = f"import pickle, sys; pickle.loads({pickle.dumps(CHECK)!r}); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
