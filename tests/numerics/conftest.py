from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, adapter_digest, parse_config
from manylora_worker.models.loader import LoadedModel, load_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.numerics.adapters import Reference, recipes, save_adapter
from tests.numerics.families import make_model


@dataclass(frozen=True)
class Family:
    """A family's checkpoint, its adapters' folders, the model as the worker loads it, and the oracle."""

    name: str
    folder: Path
    adapters: dict[str, Path]
    loaded: LoadedModel
    reference: Reference

    def put_adapters(self, objects: Path) -> dict[str, AdapterUid]:
        """Copies the adapters into an adapter store's folder of objects; returns their uids by their names."""
        uids = {
            name: adapter_digest(parse_config((folder / CONFIG_NAME).read_bytes()), folder / WEIGHTS_NAME)
            for name, folder in self.adapters.items()
        }
        for name, uid in uids.items():
            shutil.copytree(self.adapters[name], objects / uid, dirs_exist_ok=True)
        return uids


FamilyOf = Callable[[str], Family]


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> FamilyOf:
    """Builds each family once a session."""
    built: dict[str, Family] = {}

    def build(name: str) -> Family:
        if name not in built:
            folder = tmp_path_factory.mktemp(name) / f"tiny-{name}"
            model = make_model(name, folder)
            model.name_or_path = f"someone/tiny-{name}"
            adapters = {
                adapter: save_adapter(model, folder.parent / adapter, seed, **arguments)
                for seed, (adapter, arguments) in enumerate(recipes(name).items())
            }
            fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            built[name] = Family(name, folder, adapters, load_model(str(folder)), Reference(fresh.eval(), adapters))
        return built[name]

    return build
