"""Compiles the modules of a scheduling decision with mypyc, beside the installed packages (docs/decisions/0028).

    python deploy/compile.py [--if-possible] [FOLDER]

FOLDER is where the packages are installed; without it, where this Python keeps what it installs. Needs mypy,
setuptools, a C compiler and Python's headers; takes most of a minute. Services that find a folder of another state than
their sources', or none, run the sources.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"manylora_shared": ROOT / "shared", "manylora_scheduler": ROOT / "services/scheduler"}
sys.path.insert(0, str(PACKAGES["manylora_shared"]))
from manylora_shared.process.compiled import FOLDER, MANIFEST, manifest  # noqa: E402

MODULES = {
    "manylora_shared.fairness": ("contest", "fair_queue", "flow_group", "flow_order", "seam"),
    "manylora_scheduler.core": (
        "core",
        "core_view",
        "dispatch",
        "events",
        "fleet",
        "flows",
        "placement",
        "reports",
        "request",
        "ring",
        "tickets",
        "timers",
        "worker_view",
    ),
}
"""Those that a decision passes through: a call from one compiled module to another is a call of C."""


def missing() -> str | None:
    """What there is not, of what it takes."""
    compiler = str(sysconfig.get_config_var("CC")).split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"there are no headers of Python ({header})"
    return None


def compile_into(folder: Path) -> None:
    """Makes `FOLDER` in a folder, unless it is there and of these sources. Raises SystemExit with what mypyc said."""
    sources = {
        f"{package}.{name}": PACKAGES[package.partition(".")[0]].joinpath(*package.split("."), f"{name}.py")
        for package, names in MODULES.items()
        for name in names
    }
    final = folder / FOLDER
    if (final / MANIFEST).is_file() and json.loads((final / MANIFEST).read_text(encoding="utf-8")) == manifest(sources):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{FOLDER}-") as scratch:
        work, made = Path(scratch) / "work", Path(scratch) / FOLDER
        for package, parent in PACKAGES.items():
            shutil.copytree(parent / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
        files = [str(path.relative_to(PACKAGES[name.partition(".")[0]])) for name, path in sources.items()]
        # By mypyc's own command: it compiles where it is called, with mypy's settings of there, which are none.
        command = [sys.executable, "-m", "mypyc", "--follow-imports=silent", *files]
        ran = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        said = [line for line in (ran.stdout + ran.stderr).splitlines() if ".py:" in line]
        # A warning tells of code that means something else, or costs more, when it is compiled.
        if ran.returncode or said:
            raise SystemExit("\n".join(said) or ran.stdout[-4000:] + ran.stderr[-4000:])
        for library in [*work.rglob("*.so"), *work.rglob("*.pyd")]:
            target = made / library.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
        (made / MANIFEST).write_text(json.dumps(manifest(sources), indent=1), encoding="utf-8")
        if final.exists():
            final.rename(Path(scratch) / "before")
        made.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("platlib")), metavar="FOLDER")
    parser.add_argument("--if-possible", action="store_true", help="where something is missing, say so and end well")
    args = parser.parse_args()
    lack = missing()
    if lack is not None:
        said = f"{lack}: the scheduler runs as Python, at about half the decisions a second"
        if not args.if_possible:
            raise SystemExit(said)
        print(said, file=sys.stderr)
        return
    compile_into(args.folder)


if __name__ == "__main__":
    main()
