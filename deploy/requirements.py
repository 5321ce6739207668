"""Prints what `pip install .[EXTRA]` would install besides this project, one requirement a line.

The image builds install these in a layer of their own, so that a change of the code does not install them again.

    python deploy/requirements.py router | pip install -c constraints.txt -r /dev/stdin
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extra: str, pyproject: Path = PYPROJECT) -> list[str]:
    """The project's dependencies and those of one of its extras. Raises KeyError where there is no such extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
