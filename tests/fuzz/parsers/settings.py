"""What a service is told: flags, environment, and a file."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

from manylora_router.config import RouterConfig
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.process.config import ConfigError, parse
from manylora_worker.config import WorkerConfig

from tests.fuzz.harness import Harness

_FILE = Path(tempfile.mkdtemp(prefix="manylora-fuzz-")) / "settings.yaml"
_CONFIGS = (RouterConfig, SchedulerConfig, WorkerConfig)


def _of_the_system(text: str) -> str:
    """As a process gets it: bytes up to the first NUL."""
    return text.encode("utf-8", "surrogatepass").partition(b"\0")[0].decode("utf-8", "surrogateescape")


def run(data: bytes) -> None:
    """{"flags": [...], "environment": {...}, "file": "..."}"""
    try:
        given = json.loads(data)
        flags, environment, text = list(given["flags"]), dict(given["environment"]), given["file"].encode()
        flags = [_of_the_system(each) for each in flags]
        environment = {_of_the_system(name): _of_the_system(value) for name, value in environment.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    _FILE.write_bytes(text)
    for config in _CONFIGS:
        with suppress(ConfigError):
            parse(config, [*flags, f"--config={_FILE}"] if text else flags, environment)


HARNESS = Harness(run, is_json=True)
