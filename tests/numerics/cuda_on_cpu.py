"""Compiles a .cu file's source for the CPU: every index, wait and barrier of it, with fibers for threads."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path


def cuda_on_cpu(source: str, folder: Path) -> ctypes.CDLL:
    """source: with functions that call `run_blocks` of cuda_on_cpu.h."""
    shim, library = Path(__file__).with_suffix(".h"), folder / "kernel.so"
    (folder / "kernel.cc").write_text(f'#include "{shim}"\n{source}')
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", folder / "kernel.cc", "-o", library], check=True
    )
    return ctypes.CDLL(str(library))
