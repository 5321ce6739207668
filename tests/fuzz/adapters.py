"""A demo adapter's folder, with one of its files replaced, read as a worker reads it."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from manylora.demo import BASE_FOLDER, adapter_folder
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, parse_config
from manylora_worker.models.loader import load_model
from manylora_worker.weights.packing import Scratch
from manylora_worker.weights.source import AdapterBase, AdapterLimits, read_adapter

_FOLDER = Path(tempfile.mkdtemp(prefix="manylora-fuzz-"))
_LIMITS = AdapterLimits(max_rank=16, max_file_bytes=1 << 20)
# two modules, for a header that a fuzzer can grasp
_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]}


@functools.cache
def _base() -> AdapterBase:
    return load_model(str(BASE_FOLDER)).adapter_base()


def read(config: bytes | None = None, weights: bytes | None = None) -> None:
    """None: the right one. Raises what is wrong with it."""
    right = adapter_folder("upper")
    if config is None:
        config = json.dumps(_CONFIG).encode()
    else:
        parse_config(config)
    (_FOLDER / CONFIG_NAME).write_bytes(config)
    (_FOLDER / WEIGHTS_NAME).write_bytes((right / WEIGHTS_NAME).read_bytes() if weights is None else weights)
    read_adapter(_FOLDER, _base(), _LIMITS, scratch=Scratch())
