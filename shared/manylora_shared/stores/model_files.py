"""Where a base model's files are. Owns nothing, downloads nothing.

The command line, the router and the worker all take a model as a folder or as a hub id, and all find it here. The hub
cache is read by its documented layout (huggingface.co/docs/hub, "Local cache"), since not every process that asks has
huggingface_hub:

    <cache>/models--ORG--NAME/refs/main                the commit that the branch stands at
    <cache>/models--ORG--NAME/snapshots/<commit>/      the files
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from manylora_shared.process.config import environment

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


class ModelNotFound(FileNotFoundError):
    """There is no such model on this machine; the message names it."""


def model_folder(model: str, env: Mapping[str, str] | None = None) -> Path:
    """The folder with a base model's files.

    Args:
        model: a folder, or a hub id (`ORG/NAME`) whose files are in the local Hugging Face cache. A folder wins.
        env: says where the cache is; default: this process's environment.

    Raises:
        ModelNotFound: it is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    cache = hub_cache(environment() if env is None else env)
    snapshot = _snapshot(cache, model) if _HUB_ID.fullmatch(model) else None
    if snapshot is None:
        raise ModelNotFound(f"{model}: neither a folder nor a model in the local hub cache, {cache}")
    return snapshot


def model_name(model: str) -> str:
    """The last component of a folder or of a hub id. Adapters name the model that they were made for by it."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def hub_cache(env: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it has downloaded, under these environment variables."""
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshot(cache: Path, hub_id: str) -> Path | None:
    cached = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (cached / "refs" / "main").read_text().strip()
    except FileNotFoundError:
        return None
    folder = cached / "snapshots" / commit
    return folder if commit and folder.is_dir() else None
