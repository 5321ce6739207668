"""The adapter_config.json of an adapter whose weights are right."""

from __future__ import annotations

from tests.fuzz.adapters import read
from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    read(config=data)


# patterns may compile for half a second and match for two
HARNESS = Harness(run, max_cpu_s=4.0, is_json=True)
