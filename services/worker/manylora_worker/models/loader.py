"""Loading a base model: checks that it can be served exactly, then puts our attention and LoRA linears into it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from manylora_shared.stores.model_files import ModelNotFound, model_folder, model_name
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from manylora_worker.models.checkpoint import (
    ModelRefused,
    Quantization,
    check_weight_files,
    checked_config,
    class_of,
    max_context_tokens,
    older_names,
    said,
    shipped_scheme,
    take_long_factors,
    whole_names,
    without_adapter,
)
from manylora_worker.models.digest import model_digest
from manylora_worker.models.experts import (
    FoundExperts,
    find_experts,
    install_mixtures,
    modules_of,
    taken_over,
    whole_experts,
)
from manylora_worker.models.layers.attention import ATTENTION, register_attention
from manylora_worker.models.layers.kv_cache import KvGeometry
from manylora_worker.models.layers.lora_linear import LoraLinear, LoraSwitch
from manylora_worker.models.layers.packed_linear import can_pack
from manylora_worker.models.linears import head_modules_of, install_linears, linear_modules, pack_linears
from manylora_worker.models.probe import AttentionTraits, probe
from manylora_worker.models.quantized.install import ShippedCodes, quantize_experts
from manylora_worker.models.quantized.loading import (
    bitsandbytes_options,
    check_experts,
    experts_to_nf4,
    from_shipped,
    keep_as_made,
    quantize,
    to_device_but_linears,
)
from manylora_worker.models.quantized.schemes import Scheme
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.models.ranks.cuts import cut_codes, cut_head, cut_linears
from manylora_worker.models.ranks.delta_cuts import codes_in_order
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.recurrent_layers import find_recurrent, install_recurrent
from manylora_worker.models.rope import base_rope
from manylora_worker.weights.sites import ExpertShape, Site, Slot, TokenBase, WholeNames
from manylora_worker.weights.source import AdapterBase

_LOG = logging.getLogger(__name__)

# Of these the check against transformers' own pass hears all: others compress or choose keys where contexts are long.
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "attention"})
_LOADING: Mapping[str, Any] = {"attn_implementation": ATTENTION, "output_loading_info": True}


@dataclass(frozen=True)
class ModelSpec:
    """Attributes:
    source_name: last component of the path or hub id that it came from.
    digest: of what it computes.
    modules: path -> (in, out) of every linear layer that an adapter may target.
    head_modules: paths of the embeddings and the output head, which it may not.
    other_modules: paths of everything else in the module tree.
    left_out: paths of parts that no text goes through.
    whole: how the model names its parts where its text part was loaded as a model of its own.
    """

    name: str
    source_name: str
    digest: str
    model_type: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    kv: KvGeometry
    modules: Mapping[str, tuple[int, int]] = field(repr=False)
    head_modules: frozenset[str] = field(repr=False)
    other_modules: frozenset[str] = field(repr=False)
    left_out: tuple[str, ...] = ()
    whole: WholeNames | None = None
    experts: Mapping[str, ExpertShape] = field(default_factory=dict)  # path -> of the stacks of experts among `modules`
    longest_context_tokens: int = 0  # with an adapter that rotates positions in its own way; 0: no longer
    rotation: str = ""  # where it is not the folder's: checkpoint.take_long_factors

    @property
    def longest(self) -> int:
        return max(self.max_context_tokens, self.longest_context_tokens)


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    spec: ModelSpec
    sites: Sequence[Site]
    switch: LoraSwitch
    dtype: torch.dtype
    device: torch.device
    num_threads: int
    keeps_logits: bool  # forward() takes the rows whose logits are wanted
    attention_traits: Sequence[AttentionTraits]  # by layer
    group: RankGroup | None = None  # of ranks that share the model: sites, heads and kv are this one's

    def adapter_base(self, aliases: Sequence[str] = (), *, is_read: bool = True) -> AdapterBase:
        """aliases: further names that adapters may give the model. is_read: whether a decoder of our own runs it."""
        spec = self.spec
        is_cpu = self.device.type != "cuda"
        head = self._head_site if is_read and is_cpu and self.group is None else None
        more = {} if head is None else {head.slots[0].path: (head.in_features, head.slots[0].stop)}
        return AdapterBase(
            names=(spec.name, spec.source_name, *aliases),
            modules={**spec.modules, **more},
            head_modules=spec.head_modules - more.keys(),
            head=next(iter(more), ""),
            other_modules=spec.other_modules,
            left_out=spec.left_out,
            whole=spec.whole,
            sites=(*self.sites, *([] if head is None else [head])),
            dtype=self.dtype,
            biased=frozenset(self._biased()),
            vectors_problem=self._vectors_problem,
            experts=spec.experts,
            tokens=self._token_base(is_read=is_read),
            composes_experts=is_cpu,
            rope=base_rope(
                self.model.config.get_text_config(),
                spec.longest,
                is_read=is_read,
                rotates_all=all(traits.rotates for traits in self.attention_traits),
            ),
        )

    def _token_base(self, *, is_read: bool) -> TokenBase:
        model = self.model
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        paths = {id(module): path for path, module in model.named_modules()}
        problem = "" if is_read else "is not served of a model that runs as transformers wrote it"
        if self.device.type == "cuda":
            problem = "is served on the CPU alone"
        return TokenBase(
            embeddings=paths[id(embeddings)],
            head=paths.get(id(head), ""),
            num_tokens=embeddings.num_embeddings,
            width=embeddings.embedding_dim,
            is_tied=bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)),
            problem=problem if self.group is None else "is not served with --tensor-parallel",
        )

    @property
    def _head_site(self) -> Site | None:
        """Behind the layers' sites, for a decoder that adds its LoRA to the rows whose logits are wanted."""
        path, head = next(
            ((path, each) for path, each in self.model.named_modules() if each is self.model.get_output_embeddings()),
            ("", None),
        )
        if head is None or not hasattr(head, "out_features"):
            return None
        return Site(len(self.sites), head.in_features, (Slot(path, 0, head.out_features),))

    def _biased(self) -> Iterator[str]:
        for module in self.model.modules():
            if isinstance(module, LoraLinear) and getattr(module.base, "bias", None) is not None:
                yield from (slot.path for slot in module.site.slots)

    @property
    def _vectors_problem(self) -> str:
        return "" if self.group is None else "is not served with --tensor-parallel"


def load_model(
    path: str,
    *,
    name: str = "",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantization: Quantization = "none",
    threads: int = 1,
    group: RankGroup | None = None,
    max_model_len: int = 0,
) -> LoadedModel:
    """
    Args:
        path: a folder, or a hub id whose files are in the local cache.
        name: to serve it under; default: the last component of `path`.
        dtype: of weights and computation (with nf4: of computation).
        quantization: "nf4" keeps weights in 4 bits (double quantization), "fp8" in FP8 with a scale an output,
            "int4" what was shipped in 4 bits.
        group: a rank of it loads its share of the model.
        max_model_len: see prepare_model.

    Raises:
        ModelRefused: the model cannot be served, or its files are not there.
    """
    folder = _folder(path)
    source_name = model_name(path)
    _check_device(device)
    torch.set_num_threads(threads)
    config = checked_config(folder, quantization, torch.device(device).type)
    rotation = take_long_factors(config.get_text_config(), max_model_len)
    check_weight_files(folder)
    register_attention()
    # bitsandbytes' layers serve the CPU; a GPU takes kernels of our own, for which the weights are loaded as they are.
    by_bitsandbytes = quantization == "nf4" and torch.device(device).type != "cuda"
    if group is not None and by_bitsandbytes:
        raise ModelRefused(f"--tensor-parallel {group.size}: --quantization nf4 is shared among GPUs alone")
    model, left_out, codes = _instantiate(
        folder, config, dtype, device, quantization if quantization != "nf4" or by_bitsandbytes else "none",
        shipped_scheme(folder),
    )  # fmt: skip
    modules = linear_modules(model)
    if quantization == "nf4":
        experts_to_nf4(model, torch.device(device), torch.device(device if group is None else "cpu"))
    if group is None:
        codes = codes and codes_in_order(codes, model.config)
    else:  # on the host: the whole model may be more than one device of several holds
        cut_linears(model, group)
        codes = codes and cut_codes(codes, model.config, group)
    if quantization == "none":
        model = model.to(device)
    elif not by_bitsandbytes:
        to_device_but_linears(model, torch.device(device))
    loaded = prepare_model(
        model,
        device=torch.device(device),
        name=name or source_name,
        source_name=source_name,
        digest=model_digest(folder) if group is None or group.rank == 0 else "",
        quantization=quantization,
        threads=threads,
        left_out=left_out,
        whole=whole_names(config, model) or older_names(model, left_out),
        modules=modules,
        group=group,
        max_model_len=max_model_len,
        codes=codes,
    )
    return _told(loaded, rotation)


def _told(loaded: LoadedModel, rotation: str) -> LoadedModel:
    if not rotation:
        return loaded
    spec = replace(loaded.spec, rotation=rotation)
    _LOG.warning("%s, for sequences of any length: the context has %d tokens", rotation, spec.max_context_tokens)
    return replace(loaded, spec=spec)


def prepare_model(
    model: PreTrainedModel,
    *,
    name: str,
    device: torch.device | None = None,
    source_name: str = "",
    digest: str = "",
    quantization: Quantization = "none",
    threads: int = 1,
    left_out: tuple[str, ...] = (),
    whole: WholeNames | None = None,
    modules: Mapping[str, tuple[int, int]] | None = None,
    group: RankGroup | None = None,
    max_model_len: int = 0,
    codes: ShippedCodes | None = None,
) -> LoadedModel:
    """model: instantiated with ATTENTION; with a group, cut. modules: before it was. Raises ModelRefused.
    device: where it is to be; layers that are quantized may come there so. None: where it is.
    max_model_len: the longest context, of adapters with a rotation of their own, too; 0: the model's.
    codes: what the checkpoint has, which fp8 and int4 keep as it is.
    """
    dtype, device = model.dtype, device or torch.device(model.device)
    _check_states(model)
    modules = modules or linear_modules(model)
    experts = _experts(model, quantization, group)
    head_modules, all_modules = head_modules_of(model), _module_paths(model)
    switch = LoraSwitch()
    by_bitsandbytes = quantization == "nf4" and device.type != "cuda"
    sites = install_linears(model, modules, switch, fused=not by_bitsandbytes, group=group)
    if group is not None:
        cut_head(model, group)
    _quantize_or_pack(model, quantization, codes, group, device)
    sites += install_mixtures(model, experts, len(sites), switch, group)
    if quantization in ("fp8", "nf4") and codes is None:
        quantize_experts(model, quantization, group)
    experts = whole_experts(experts, group)
    modules = {**modules, **modules_of(experts)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what layers were made of: ranks' first sum takes memory beside torch's allocator
    probed = probe(model, install_recurrent(model))
    context_tokens = max_context_tokens(model.config.get_text_config())
    spec = ModelSpec(
        name=name,
        source_name=source_name or name,
        digest=digest,
        model_type=model.config.model_type,
        vocab_size=probed.vocab_size,
        max_context_tokens=min(context_tokens, max_model_len or context_tokens),
        longest_context_tokens=max_model_len,
        eos_token_ids=_eos_token_ids(model, probed.vocab_size),
        kv=probed.kv,
        modules={p: shape for p, shape in modules.items() if p not in head_modules},
        head_modules=frozenset(head_modules),
        other_modules=frozenset(all_modules - set(modules) - head_modules),
        left_out=left_out,
        whole=whole,
        experts={each.stack: each.shape for each in experts},
    )
    return LoadedModel(
        model=model,
        spec=spec,
        sites=sites,
        switch=switch,
        dtype=dtype,
        device=device,
        num_threads=threads,
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        attention_traits=probed.attention_traits,
        group=group,
    )


def _module_paths(model: PreTrainedModel) -> set[str]:
    # a stack is none, whether it is in codes or not
    return {path for path, each in model.named_modules() if path and not isinstance(each, QuantizedStack)}


def _quantize_or_pack(
    model: PreTrainedModel,
    quantization: Quantization,
    codes: ShippedCodes | None,
    group: RankGroup | None,
    device: torch.device,
) -> None:
    quantize(model, quantization, codes, group, device)
    if quantization == "none" and can_pack(model.dtype, model.device):
        pack_linears(model)


def _experts(model: PreTrainedModel, quantization: Quantization, group: RankGroup | None) -> list[FoundExperts]:
    """Those that are ours. Raises ModelRefused."""
    found = taken_over(model, find_experts(model))
    paths = {path for path, _ in model.named_modules() if path.endswith(".experts")}
    strange = sorted(paths - {each.stack for each in found})
    check_experts(model, quantization, strange)
    if group is not None and strange:  # transformers' own would not sum over the ranks
        raise ModelRefused(f"--tensor-parallel {group.size}: {strange[0]} are no experts as we know them")
    return found


def _check_states(model: PreTrainedModel) -> None:
    """Raises ModelRefused. What has a convolution over tokens keeps a state."""
    model_type, text = model.config.model_type, model.config.get_text_config()
    strange = sorted({str(each) for each in getattr(text, "layer_types", None) or () if each} - _LAYER_KINDS)
    if strange:
        raise ModelRefused(
            f"{model_type}: layers of the kind {strange[0]} are not served: they may keep more than keys and values"
        )
    known = {id(child) for _, layer in find_recurrent(model) for child in layer.modules()}
    convolutions = ((path, each) for path, each in model.named_modules() if isinstance(each, nn.Conv1d))
    path = next((path for path, each in convolutions if id(each) not in known), None)
    if path is not None:
        raise ModelRefused(
            f"{model_type}: {path} keeps a state beside keys and values, from token to token, "
            "which is not served (recurrent layers that are neither gated delta nets nor Mamba 2)"
        )


def model_config(path: str, quantization: Quantization, device: str) -> PretrainedConfig:
    """Raises ModelRefused."""
    return checked_config(_folder(path), quantization, torch.device(device).type)


def _folder(path: str) -> Path:
    try:
        return model_folder(path)
    except ModelNotFound as error:
        raise ModelRefused(str(error)) from error


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ModelRefused(f"--device {device}: cannot be used ({said(error)})") from error


def _instantiate(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str,
    quantization: Quantization,
    scheme: Scheme | None,
) -> tuple[PreTrainedModel, tuple[str, ...], ShippedCodes | None]:
    """The model, on the host, parts that it is served without, and what it has quantized. scheme: see shipped_scheme.

    device: of bitsandbytes' layers.
    """
    options = bitsandbytes_options(config, dtype, device) if quantization == "nf4" else {}
    codes: ShippedCodes | None = None
    try:
        if scheme is None:
            with without_adapter(folder) as plain_folder:
                model, loading = class_of(config).from_pretrained(
                    plain_folder,
                    config=config,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    **_LOADING,
                    **options,
                )
        else:
            model, loading, codes = from_shipped(
                folder, scheme, config, dtype, _LOADING, keeps_codes=quantization in ("fp8", "int4")
            )
    except Exception as error:  # whatever transformers or a quantizer raises is about this folder
        raise ModelRefused(f"{folder}: {said(error)}") from error
    if loading["missing_keys"] or loading["mismatched_keys"]:
        absent = sorted([*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])])
        raise ModelRefused(f"{folder}: {len(absent)} weights are missing or misshapen, such as {absent[0]}")
    linears = linear_modules(model)
    unused = sorted(key for key in loading["unexpected_keys"] if key.rpartition(".")[0] in linears)
    if unused:  # a bias that the config denies, scales of a quantization that it does not name
        raise ModelRefused(f"{folder}: linear layers have {len(unused)} weights that are not used, such as {unused[0]}")
    left_out = _keep_text_alone(model)
    if quantization == "nf4":
        keep_as_made(model)
    model.eval().requires_grad_(False)
    return model, left_out, codes


def _keep_text_alone(model: PreTrainedModel) -> tuple[str, ...]:
    """The paths of what it takes out: Gemma 3 is published as a model of text and images."""
    if model.config.get_text_config() is model.config:
        return ()
    body, decoder = model.base_model, model.get_decoder()
    others = [(name, child) for name, child in body.named_children() if child is not decoder]
    paths = tuple(path for path, module in model.named_modules() if any(module is child for _, child in others))
    for name, _ in others:
        delattr(body, name)
    return paths


def _eos_token_ids(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """Of the first of its configurations that names a token. Where none does, the router takes its tokenizer's."""
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        named = getattr(config, "eos_token_id", None)
        each = named if isinstance(named, (list, tuple)) else [] if named is None else [named]
        ids = tuple(i for i in each if isinstance(i, int) and 0 <= i < vocab_size)
        if len(ids) < len(each):
            dropped = [i for i in each if i not in ids]
            _LOG.warning("%s.eos_token_id: %s is dropped, no token of %d", type(config).__name__, dropped, vocab_size)
        if ids:
            return ids
    return ()
