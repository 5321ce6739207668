"""Where a base model's files are: a folder, or a hub id in the local cache. Downloads nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from manylora_shared.process.config import environment

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


# Not every process that asks has huggingface_hub, so the cache is read by its documented layout ("Local cache"):
#
#     <cache>/models--ORG--NAME/refs/main                the commit that the branch stands at
#     <cache>/models--ORG--NAME/snapshots/<commit>/      the files
class ModelNotFound(FileNotFoundError):
    """The message names it."""


def model_folder(model: str, env: Mapping[str, str] | None = None) -> Path:
    """`model` as a folder wins over a hub id. Raises ModelNotFound."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    cache = hub_cache(environment() if env is None else env)
    snapshot = _snapshot(cache, model, "main") if _HUB_ID.fullmatch(model) else None
    if snapshot is None:
        raise ModelNotFound(f"{model}: neither a folder nor a model in the local hub cache, {cache}")
    return snapshot


def model_name(model: str) -> str:
    """Of a hub id, a folder, or a hub cache's snapshot (`models--ORG--NAME/snapshots/<commit>`)."""
    parts = [part for part in re.split(r"[/\\]", model) if part]
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        parts = parts[:-2]
    name = parts[-1] if parts else ""
    return name.rsplit("--", 1)[-1] if name.startswith("models--") else name


def hub_cache(env: Mapping[str, str]) -> Path:
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def hub_snapshot(hub_id: str, revision: str, env: Mapping[str, str]) -> Path | None:
    """revision: a branch, a tag or a commit. None: the local cache has none."""
    return _snapshot(hub_cache(env), hub_id, revision)


def _snapshot(cache: Path, hub_id: str, revision: str) -> Path | None:
    cached = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (cached / "refs" / revision).read_text().strip()
    except FileNotFoundError:
        commit = revision
    folder = cached / "snapshots" / commit
    return folder if commit and folder.is_dir() else None
