"""Writes a base model with an adapter in its weights: `python -m manylora_worker.models.merging --model ...`.

Runs beside a cluster, never in one. Products and sums are of 32-bit floats, rounded once to the base model's type.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from manylora_shared.errors import InvalidRequest
from manylora_shared.process.config import set_default
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, parse_config
from manylora_shared.stores.adapter_rope import ROPE_KEY
from manylora_shared.stores.model_files import ModelNotFound, model_folder
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from manylora_worker.models.checkpoint import (
    ModelRefused,
    check_weight_files,
    checked_config,
    class_of,
    said,
    shipped_scheme,
    without_adapter,
)
from manylora_worker.models.digest import model_digest
from manylora_worker.models.experts import expert_linear, find_experts, merge_stacks
from manylora_worker.models.rope import base_rope, stretch
from manylora_worker.weights.layout import VectorKind
from manylora_worker.weights.peft_config import (
    LoraSettings,
    ModuleMatcher,
    Problems,
    parse_settings,
    trained_tokens,
)
from manylora_worker.weights.sites import TokenBase
from manylora_worker.weights.source import TOKENS, parse_key
from manylora_worker.weights.stacked import is_stack_key

_MAX_RANK = 1 << 20
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".py"})
_MAX_CONTEXT = 1 << 24


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
    scheme = shipped_scheme(folder)
    if scheme is not None:
        raise ModelRefused(f"{folder}: is quantized ({scheme.label}): merge into the model's unquantized weights")
    if digest and (found := model_digest(folder)) != digest:
        raise ModelRefused(f"{folder}: is not the base model that the adapter was validated against: {found[:12]}...")
    try:
        with without_adapter(folder) as plain_folder:
            base: PreTrainedModel = class_of(config).from_pretrained(
                plain_folder, config=config, dtype="auto", use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # whatever transformers raises is about this folder
        raise ModelRefused(f"{folder}: {said(error)}") from error
    adapter_config = parse_config((adapter / CONFIG_NAME).read_bytes())
    changed = _add(base, adapter_config, load_file(adapter / WEIGHTS_NAME))
    _rotate(base, adapter_config)
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
    parts: dict[str, dict[str | VectorKind, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        path, part = parse_key(name)
        if part is None:
            raise InvalidRequest.of(name, "is not a matrix or vector of LoRA, and cannot be merged")
        parts[path][part] = tensor
    mixtures = find_experts(model)
    stacks = {each.stack: each.shape for each in mixtures}
    routers = {each.router for each in mixtures if each.router_name}
    tokens = {path: parts.pop(path) for path in [path for path, own in parts.items() if TOKENS in own]}
    _merge_tokens(model, settings, tokens)
    merge_stacks(model, stacks, parts, matcher)
    for path, own in sorted(parts.items()):
        if is_stack_key(path, stacks):
            continue
        module = expert_linear(model, path, stacks) or modules.get(path)
        if not isinstance(module, nn.Linear | Conv1D) and path not in routers:
            raise InvalidRequest.of(path, "is no linear layer of this base model")
        assert module is not None
        if module is model.get_output_embeddings() and module.weight is model.get_input_embeddings().weight:
            raise InvalidRequest.of(path, "shares its weight with the embeddings, which the adapter does not change")
        named = f"{path}.weight" if matcher.is_parameter_targeted(f"{path}.weight") else path
        rank, scale = matcher.rank_and_scale(named)
        _merge_biases(path, module, own, scale)
        a, b = own.get("A"), own.get("B")
        if (a is None) is not (b is None):
            raise InvalidRequest.of(path, "has one of its matrices A and B alone")
        if a is None or b is None:
            continue
        weight = module.weight.data
        is_turned = isinstance(module, Conv1D)  # its weight is [in, out]
        shape = weight.shape[::-1] if is_turned else weight.shape
        if (b.shape[0], a.shape[1]) != tuple(shape) or not a.shape[0] == b.shape[1] == rank:
            raise InvalidRequest.of(path, f"has matrices {list(a.shape)} and {list(b.shape)}, which do not fit")
        merged = (weight.T if is_turned else weight).float() + scale * (b.float() @ a.float())
        magnitude = own.get(VectorKind.MAGNITUDE)
        if magnitude is not None:
            if magnitude.shape != shape[:1]:
                raise InvalidRequest.of(path, f"has magnitudes {list(magnitude.shape)}, which do not fit")
            merged *= (magnitude.float() / merged.norm(dim=1))[:, None]
        weight.copy_(merged.T if is_turned else merged)
    return len(parts) + len(tokens)


def _merge_tokens(
    model: PreTrainedModel, settings: LoraSettings, found: Mapping[str, Mapping[str | VectorKind, Tensor]]
) -> None:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    base = TokenBase(
        paths[id(embeddings)],
        paths.get(id(head), ""),
        embeddings.weight.shape[0],
        embeddings.weight.shape[1],
        is_tied=embeddings.weight is head.weight,
        problem="",
    )
    problems = Problems()
    shapes = {path: tuple(own[TOKENS].shape) for path, own in found.items()}
    for each in trained_tokens(settings, base, shapes, problems):
        if base.is_tied and not (each.embeds and each.heads):
            raise InvalidRequest.of(each.path, "shares its weight with the model's other end, which has not these rows")
        module = embeddings if each.embeds else head
        module.weight.data[list(each.ids)] = found[each.path][TOKENS].to(module.weight.dtype)
    if problems.violations:
        raise InvalidRequest.of_all(problems.violations)


def _merge_biases(path: str, module: nn.Module, own: Mapping[str | VectorKind, Tensor], scale: float) -> None:
    for kind in (VectorKind.BIAS, VectorKind.LOW_RANK_BIAS):
        vector = own.get(kind)
        if vector is None:
            continue
        if module.bias is None:
            raise InvalidRequest.of(path, "has a bias, and the base model's layer has none to merge it into")
        if vector.shape != module.bias.shape:
            raise InvalidRequest.of(path, f"has a bias {list(vector.shape)}, which does not fit")
        data = module.bias.data
        data.copy_(vector if kind is VectorKind.BIAS else data.float() + scale * vector.float())


def _rotate(model: PreTrainedModel, adapter_config: Mapping[str, object]) -> None:
    """The adapter's own rotation of positions becomes the merged model's. Raises InvalidRequest."""
    config = model.config.get_text_config()
    try:
        scaling = base_rope(config, _MAX_CONTEXT, is_read=True).scaling_of(adapter_config)
    except ValueError as error:
        raise InvalidRequest.of(ROPE_KEY, str(error)) from None
    if scaling is not None:
        stretch(config, scaling)


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
