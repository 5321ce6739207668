"""A model by its folder and by its hub id, in a hub cache that is made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from manylora.cli import cluster
from manylora_router import __main__ as router_main
from manylora_router.text.service import TokenIdsOnlyText
from manylora_shared.stores.model_files import ModelNotFound, hub_cache, model_folder, model_name

HUB_ID = "acme/tiny-llama"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of HUB_ID's files in the local hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / "models--acme--tiny-llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(REVISION)
    folder = cached / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_hub_id_is_its_snapshot_and_keeps_its_name(snapshot: Path) -> None:
    assert model_folder(HUB_ID).resolve() == snapshot.resolve()
    assert model_name(HUB_ID) == model_name(str(snapshot)) == model_name(f"{snapshot}/") == "tiny-llama"


def test_a_folder_wins_over_a_hub_id(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / HUB_ID).mkdir(parents=True)
    assert model_folder(HUB_ID) == Path(HUB_ID)
    assert model_name("/models/tiny/") == "tiny"


@pytest.mark.parametrize("model", ["acme/other", "no such model", "/nowhere/at/all", "../tiny-llama"])
def test_what_is_not_here_is_not_downloaded(snapshot: Path, model: str) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder nor a model in the local hub cache") as caught:
        model_folder(model)
    assert str(caught.value).startswith(model)


def test_a_snapshot_that_was_removed_is_not_there(snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    snapshot.rmdir()
    with pytest.raises(ModelNotFound):
        model_folder(HUB_ID)


@pytest.mark.parametrize("names", [[], ["XDG_CACHE_HOME"], ["HF_HOME"], ["HUGGINGFACE_HUB_CACHE"], ["HF_HUB_CACHE"]])
def test_the_cache_is_where_huggingface_hub_has_it(names: list[str]) -> None:
    """Asked in a process of its own, for it reads the environment when it is imported."""
    env = {"HOME": "/home/x", "PATH": os.defpath} | {name: "/cache" for name in names}
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    ours = hub_cache(env | {"HOME": str(Path.home())})
    assert str(ours).replace(str(Path.home()), "/home/x") == theirs.stdout.strip()


def test_the_command_line_gives_the_services_the_hub_id(snapshot: Path) -> None:
    assert cluster.model_source(HUB_ID) == HUB_ID
    assert cluster.name_of(HUB_ID) == "tiny-llama"
    (snapshot / "config.json").unlink()
    with pytest.raises(typer.Exit) as no_config:
        cluster.model_source(HUB_ID)
    with pytest.raises(typer.Exit) as not_cached:
        cluster.model_source("acme/other")
    assert no_config.value.exit_code == not_cached.value.exit_code == 2


def test_the_router_looks_for_the_tokenizer_there(snapshot: Path) -> None:
    assert isinstance(router_main.load_text(HUB_ID), TokenIdsOnlyText)
    with pytest.raises(ModelNotFound):
        router_main.load_text("acme/other")
