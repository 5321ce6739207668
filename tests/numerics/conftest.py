from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, adapter_digest, parse_config
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.kv_scales import with_fp8_kv
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

    @property
    def kv_cache_dtype(self) -> Literal["auto", "fp8"]:
        return "fp8" if self.loaded.spec.kv.scales else "auto"

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
KV_IN_FP8 = " with KV in fp8"  # behind a family's name


def reference_of(folder: Path, adapters: Mapping[str, Path], scales: Sequence[tuple[float, float]] = ()) -> Reference:
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Reference(fresh.eval(), adapters, scales)


def in_fp8(family: Family) -> Family:
    """Its keys and values are, and the oracle's."""
    loaded = with_fp8_kv(family.loaded)
    reference = reference_of(family.folder, family.adapters, loaded.spec.kv.scales)
    return replace(family, loaded=loaded, reference=reference)


_IN_ITS_OWN = "MANYLORA_TEST_IN_ITS_OWN_PROCESS"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked `own_process` by a pytest of its own."""
    if pyfuncitem.get_closest_marker("own_process") is None or _IN_ITS_OWN in os.environ:
        return None
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, _IN_ITS_OWN: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode or " 1 passed" not in run.stdout:
        pytest.fail(run.stdout, pytrace=False)
    return True


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
            kept, is_fp8, _ = name.partition(KV_IN_FP8)
            if is_fp8:
                built[name] = in_fp8(build(kept))
                return built[name]
            folder = tmp_path_factory.mktemp(name) / f"tiny-{name}"
            model = make_model(name, folder)
            model.name_or_path = f"someone/tiny-{name}"
            adapters = {
                adapter: save_adapter(model, folder.parent / adapter, seed, **arguments)
                for seed, (adapter, arguments) in enumerate(recipes(name).items())
            }
            built[name] = Family(name, folder, adapters, load_model(str(folder)), reference_of(folder, adapters))
        return built[name]

    return build
