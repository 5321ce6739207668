"""Generates the committed stubs from protos/: run it after every change (`make proto`); a test fails when they drift.

protos/manylora/v1/*.proto -> shared/manylora/v1/                (messages and their types)
protos/etcd/rpc.proto      -> shared/manylora_shared/coordination/rpc_pb2.py   (likewise)
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent


def generate(root: Path) -> None:
    """Writes all stubs below `root`, laid out as in the repository. Raises RuntimeError where protoc refuses."""
    common = ["protoc", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    ours = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "manylora").rglob("*.proto"))
    shared = root / "shared"
    coordination = shared / "manylora_shared" / "coordination"
    runs = [
        [*common, f"-I{PROTOS}", f"--python_out={shared}", f"--pyi_out={shared}", *ours],
        [*common, f"-I{PROTOS / 'etcd'}", f"--python_out={coordination}", f"--pyi_out={coordination}", "rpc.proto"],
    ]
    coordination.mkdir(parents=True, exist_ok=True)
    for arguments in runs:
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc failed: {' '.join(arguments)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
