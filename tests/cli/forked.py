"""The command line in processes forked from one that has imported it: what a start costs is paid once, not by each.

A command gets its arguments, environment and streams as if it had been started anew; nothing of what it does has
happened before the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

STREAMS = ("stdin", "stdout", "stderr")
"""Files of a command's folder, in the order of their descriptors."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "manylora.cli.app", "manylora.client", "typer._adapters"])


def start(arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path) -> multiprocessing.Process:
    """Starts a command that reads `folder`/stdin and writes its other streams there; close it in the end."""
    process = _FORKS.Process(target=_run, args=(arguments, dict(environment), folder))
    process.start()
    return process


def _run(arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    for number, name in enumerate(STREAMS):
        mode = "w" if number else "r"
        with (folder / name).open(mode) as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["manylora", *arguments]
    runpy.run_module("manylora", run_name="__main__")
