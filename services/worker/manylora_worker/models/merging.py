"""Writes a base model with an adapter in its weights: `python -m manylora_worker.models.merging --model ...`.

Runs beside a cluster, never in one. Products and sums are of 32-bit floats, rounded once to the base model's type.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from manylora_shared.errors import InvalidRequest
from manylora_shared.process.config import set_default
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, parse_config
from manylora_shared.stores.model_files import ModelNotFound, model_folder
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from manylora_worker.models.checkpoint import ModelRefused, check_weight_files, checked_config, said, without_adapter
from manylora_worker.models.digest import model_digest
from manylora_worker.weights.peft_config import ModuleMatcher, PatternTimeout, Problems, parse_settings
from manylora_worker.weights.source import KEY_PREFIX

_MAX_RANK = 1 << 20
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".py"})
_MATRICES = (".lora_A.weight", ".lora_B.weight")


def merge(model: str, adapter: Path, output: Path, *, digest: str = "") -> int:
    """Writes the folder `output`, which is not there or empty. Returns how many layers changed.

    digest: of the base model that the adapter was validated against; empty: not known.

    Raises:
        ModelRefused, InvalidRequest: the base model or the adapter cannot be used, or they do not fit.
        OSError
    """
    folder = model_folder(model)
    config = checked_config(folder, "none", "cpu")
    check_weight_files(folder)
    if digest and (found := model_digest(folder)) != digest:
        raise ModelRefused(f"{folder}: is not the base model that the adapter was validated against: {found[:12]}...")
    try:
        with without_adapter(folder) as plain_folder:
            base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                plain_folder, config=config, dtype="auto", use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # whatever transformers raises is about this folder
        raise ModelRefused(f"{folder}: {said(error)}") from error
    changed = _add(base, parse_config((adapter / CONFIG_NAME).read_bytes()), load_file(adapter / WEIGHTS_NAME))
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        base.save_pretrained(unfinished)
        _copy_others(folder, unfinished)
        if output.is_dir():
            output.rmdir()
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return changed


def _add(model: PreTrainedModel, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> int:
    problems = Problems()
    settings = parse_settings(
        dict(config), base_names=(str(config.get("base_model_name_or_path")),), max_rank=_MAX_RANK, problems=problems
    )
    if settings is None or problems.violations:
        raise InvalidRequest.of_all(problems.violations)
    matcher, modules = ModuleMatcher(settings), dict(model.named_modules())
    paths = sorted({_path_of(name) for name in tensors})
    for path in paths:
        module = modules.get(path)
        if not isinstance(module, nn.Linear | Conv1D) or module is model.get_output_embeddings():
            raise InvalidRequest.of(path, "is no linear layer of this base model")
        try:
            rank, scale = matcher.rank_and_scale(path)
        except PatternTimeout:
            raise InvalidRequest.of("rank_pattern", "its patterns take too long to match") from None
        a, b = (tensors.get(f"{KEY_PREFIX}{path}{suffix}") for suffix in _MATRICES)
        if a is None or b is None:
            raise InvalidRequest.of(path, "has one of its matrices A and B alone")
        weight = module.weight.data
        shape = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]  # Conv1D's is [in, out]
        if (b.shape[0], a.shape[1]) != tuple(shape) or not a.shape[0] == b.shape[1] == rank:
            raise InvalidRequest.of(path, f"has matrices {list(a.shape)} and {list(b.shape)}, which do not fit")
        update = scale * (b.float() @ a.float())
        weight.copy_(weight.float() + (update if isinstance(module, nn.Linear) else update.T))
    return len(paths)


def _path_of(name: str) -> str:
    for suffix in _MATRICES:
        if name.startswith(KEY_PREFIX) and name.endswith(suffix):
            return name[len(KEY_PREFIX) : -len(suffix)]
    raise InvalidRequest.of(name, "is not a LoRA A or B matrix, and cannot be merged")


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, templates, defaults of generation: what stands beside the weights."""
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.suffix in _WEIGHTS or is_index or path.name == CONFIG_NAME or not path.is_file():
            continue
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder, or a name in the local hub cache")
    parser.add_argument("--adapter", required=True, type=Path, help="folder of a PEFT adapter")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--digest", default="", help="of the base model, as the adapter's report tells it")
    arguments = parser.parse_args()
    set_default("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level=logging.WARNING)
    try:
        with torch.inference_mode():
            changed = merge(arguments.model, arguments.adapter, arguments.output, digest=arguments.digest)
    except (ModelRefused, ModelNotFound, InvalidRequest, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"{changed} layers of {arguments.model} were changed", file=sys.stderr)


if __name__ == "__main__":
    main()
