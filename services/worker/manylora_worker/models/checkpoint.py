"""What a base model's folder says of itself, and whether it can be served exactly by that. Reads, never writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from manylora_shared.sampling import MODEL_DEFAULTS, PARAMETERS, Kind
from manylora_shared.stores.adapter_files import CONFIG_NAME as ADAPTER_CONFIG_NAME
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from manylora_worker.models.quantized.schemes import Scheme, SchemeRefused, scheme_of
from manylora_worker.weights.sites import WholeNames

_LOG = logging.getLogger(__name__)

Quantization = Literal["none", "nf4", "fp8", "int4"]
LONG_FACTORS = "longrope, long factors"  # the same at all workers of a pool
_SHORT, _LONG = "short_factor", "long_factor"
_OLDER_TEXTS = ("model", "language_model.model")  # before transformers 4.52
MAX_LAYERS = 4096  # transformers makes a list of as many as a configuration tells


_MODEL_TYPES = frozenset({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


class ModelRefused(ValueError): ...


def class_of(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Of a model of text, or of text and more."""
    is_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def checked_config(folder: Path, quantization: Quantization, device_type: str) -> PretrainedConfig:
    """Raises ModelRefused."""
    raw = _json_of(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelRefused(f"{folder}: no *.safetensors weights (pickled weights are not read)")
    for name, value in _fields(raw):
        if "layer" in name and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ModelRefused(f"{folder / 'config.json'}: {name}: more than {MAX_LAYERS} layers")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str | None):
        raise ModelRefused(f"{folder / 'config.json'}: model_type must be a text")
    # A model type that transformers knows is built by its class, whatever code of its own the folder brings (Phi-3).
    if raw.get("auto_map") and model_type not in _MODEL_TYPES:
        raise ModelRefused(f"{folder}: auto_map: the model brings its own code, which is not run")
    _check_quantization(folder, raw, quantization, device_type)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text_config = config.get_text_config()
    except Exception as error:
        raise ModelRefused(f"{folder / 'config.json'}: {said(error)}") from error
    own = raw.get("text_config")
    if raw.get("tie_word_embeddings") is True and isinstance(own, dict) and "tie_word_embeddings" not in own:
        text_config.tie_word_embeddings = True  # the whole model's word, which transformers' class of the text misses
    if quantization != "nf4":  # weights that are shipped quantized are rebuilt before transformers sees them
        for each in (config, text_config):
            if isinstance(each, PretrainedConfig):
                vars(each).pop("quantization_config", None)
                vars(each).pop("compression_config", None)
    if config.is_encoder_decoder or config.model_type not in _MODEL_TYPES:
        raise ModelRefused(f"{folder}: model_type {config.model_type} is not a causal language model")
    for rope in _rope_parameters(text_config):
        rope_type = rope.get("rope_type", "default")
        if "dynamic" in str(rope_type):
            raise ModelRefused(
                f"{folder}: rope_type {rope_type}: its frequencies depend on the longest sequence of a batch, "
                "so one request would change another's answer"
            )
    return config


def weight_files(folder: Path) -> list[Path]:
    """That transformers reads. Raises ModelRefused where one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    weight_map = _json_of(index).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    absent = [name for name in names if not (folder / name).exists()]
    if absent or not names:
        raise ModelRefused(f"{index}: of {len(names)} weight files {len(absent)} are missing: {', '.join(absent[:3])}")
    return [folder / name for name in names]


def check_weight_files(folder: Path) -> None:
    """Raises ModelRefused where one is missing, unreadable or cut short."""
    for file in weight_files(folder):
        try:
            file.open("rb").close()  # what the system says of it is clearer
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"{file}: not a readable weight file ({said(error)})") from error


def take_long_factors(config: PretrainedConfig, max_model_len: int) -> str:
    """Makes longrope's short factors the long ones where contexts are to be longer than the original. Returns what
    rotates now; empty: what the folder says. config: of the text part. Raises ModelRefused.
    """
    # transformers takes them for a whole batch, its cached keys too, once one sequence is longer. Keys that stand in
    # blocks cannot be turned again, and no request is to change another's answer: so it is one set for all.
    with _lengths_told():
        found = [rope for rope in _rope_parameters(config) if _switches(rope) and rope.get(_LONG)]
        longer = [rope for rope in found if max_model_len > _original_tokens(config, rope)]
    for rope in longer:
        rope[_SHORT] = rope[_LONG]  # the factor of attention stays: it follows from the model's own lengths
    return LONG_FACTORS if longer else ""


def max_context_tokens(config: PretrainedConfig) -> int:
    """config: of the text part. Raises ModelRefused."""
    with _lengths_told():
        limit = _max_context_tokens(config)
    if type(limit) is not int or limit < 1:
        raise ModelRefused(f"config.json: its context has {str(limit)[:40]} tokens")
    return limit


@contextmanager
def _lengths_told() -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelRefused(f"config.json: it does not say how long a context may be ({said(error)})") from error


def _switches(rope: Mapping[str, Any]) -> bool:
    # whether transformers rotates long sequences by other factors
    return rope.get("rope_type") == "longrope" and rope.get(_SHORT) != rope.get(_LONG)


def _original_tokens(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    original: int = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return original


def _max_context_tokens(config: PretrainedConfig) -> int:
    limit: int = config.max_position_embeddings
    for rope in _rope_parameters(config):
        if _switches(rope) and (original := _original_tokens(config, rope)) < limit:
            _LOG.warning(
                "longrope: the context ends at its original length, %d tokens: --max-model-len above it, up to %d, "
                "takes the long factors, for short sequences too",
                original,
                limit,
            )
            limit = original
        if rope.get("rope_type") == "yarn" and rope.get("factor"):
            # Qwen's cards add it without raising max_position_embeddings.
            lengthened = int(rope["original_max_position_embeddings"] * rope["factor"])
            if lengthened > limit:
                _LOG.info("yarn: the context is lengthened to %d tokens, from %d", lengthened, limit)
                limit = lengthened
    return limit


def sampling_defaults(folder: Path) -> dict[str, float]:
    """What generation_config.json names of MODEL_DEFAULTS, as the model's makers recommend it. Raises ModelRefused."""
    file = folder / "generation_config.json"
    raw = _json_of(file) if file.exists() else {}
    rows = {row.name: row for row in PARAMETERS}
    found: dict[str, float] = {}
    for name in MODEL_DEFAULTS:
        value, row = raw.get(name), rows[name]
        if value is None:
            continue
        is_number = type(value) is int or (type(value) is float and row.kind is not Kind.COUNT)
        if not is_number or abs(value) >= 1 << 32 or value not in row.range:
            _LOG.warning("%s: %s: %.100r is dropped: must be %s", file, name, value, row.range)
        elif value != row.default:
            found[name] = value
    if found:
        _LOG.info("requests that do not set them get the model's %s", found)
    return found


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """The folder, or links to its files but for an adapter's that a trainer left there: transformers would load it."""
    if not (folder / ADAPTER_CONFIG_NAME).exists():
        yield folder
        return
    _LOG.warning("%s: %s is of an adapter: it is not part of the base model and not used", folder, ADAPTER_CONFIG_NAME)
    with TemporaryDirectory(prefix="manylora-model-") as made:
        for file in folder.iterdir():
            if not file.name.startswith("adapter_"):
                (Path(made) / file.name).symlink_to(file.absolute())
        yield Path(made)


def said(error: BaseException) -> str:
    """The error's first line, with its kind where that says more."""
    lines = str(error).strip().splitlines()
    text = lines[0][:400] if lines else ""
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"


def _json_of(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{file}: not readable ({said(error)})") from error
    if not isinstance(raw, dict):
        raise ModelRefused(f"{file}: not readable (a JSON object is expected)")
    return raw


def _fields(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """With those of the parts for text and images."""
    for name, value in raw.items():
        yield name, value
        if isinstance(value, dict):
            yield from value.items()


def shipped_scheme(folder: Path) -> Scheme | None:
    """Of weights that the folder has quantized, but by bitsandbytes. Raises ModelRefused."""
    options = _stated_quantization(_json_of(folder / "config.json"))
    if options is None or options.get("load_in_4bit") or options.get("load_in_8bit"):
        return None
    try:
        return scheme_of(options)
    except SchemeRefused as error:
        raise ModelRefused(
            f"{folder / 'config.json'}: quantization_config: the weights are quantized already ({error}), which is not "
            "served: take the model's unquantized weights, with --quantization nf4 for 4 bits"
        ) from error


def _stated_quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    places = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    stated = [place[key] for place in places for key in ("quantization_config", "compression_config") if place.get(key)]
    if not stated:
        return None
    return stated[0] if isinstance(stated[0], dict) else {}


def _check_quantization(folder: Path, raw: Mapping[str, Any], quantization: Quantization, device_type: str) -> None:
    """Of bitsandbytes' formats, only nf4 on the CPU is computed here as its maker computes it."""
    options = _stated_quantization(raw)
    if options is None:
        if quantization == "int4":
            raise ModelRefused(
                f"{folder}: --quantization int4 keeps what awq, gptq or compressed-tensors ship; this model is not "
                "quantized"
            )
        return
    problem = f"{folder / 'config.json'}: quantization_config: the weights are quantized already"
    scheme = shipped_scheme(folder)
    if scheme is not None:
        kept = {"fp8": ("fp8",), "int4": ("awq", "gptq", "packed")}
        if quantization != "none" and scheme.kind not in kept.get(quantization, ()):
            raise ModelRefused(
                f"{problem} ({scheme.label}), and not once more: start without --quantization {quantization}"
            )
        return
    bits = "4bit" if options.get("load_in_4bit") else "8bit"
    kind = options.get("bnb_4bit_quant_type", "fp4") if bits == "4bit" else ""
    problem = f"{problem} ({' '.join(filter(None, ('bitsandbytes', bits, kind)))})"
    if kind != "nf4":
        raise ModelRefused(
            f"{problem}, which is not served: take the model's unquantized weights, with --quantization nf4 for 4 bits"
        )
    if device_type == "cuda":
        raise ModelRefused(
            f"{problem}, which is served on the CPU alone: take the model's unquantized weights with "
            "--quantization nf4, which quantizes them as it loads"
        )
    if quantization != "nf4":
        raise ModelRefused(f"{problem}: start with --quantization nf4")


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    # one set, or one a layer type
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested: list[dict[str, Any]] = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def whole_names(config: PretrainedConfig, model: PreTrainedModel) -> WholeNames | None:
    """config: the folder's. None: the model is loaded under its own names. Qwen3.5 is published as a model of text and
    images, and transformers has a class for its text alone.
    """
    if config.get_text_config() is config or model.config.get_text_config() is not model.config:
        return None
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    body, theirs = whole.base_model, whole.get_decoder()
    others = {id(child) for child in body.children() if child is not theirs}
    return WholeNames(
        ours=text_path(model),
        theirs=_path_of(whole, theirs),
        left_out=tuple(path for path, module in whole.named_modules() if id(module) in others),
    )


def renamings(model: PreTrainedModel) -> list[WeightRenaming]:
    """transformers' own, of names that it once had for this model's parts."""
    return [each for each in get_model_conversion_mapping(model) if type(each) is WeightRenaming]


def renamed(path: str, renamings: Iterable[WeightRenaming]) -> str:
    for each in renamings:
        path, _ = each.rename_source_key(path)
    return path


def older_names(model: PreTrainedModel, left_out: Iterable[str]) -> WholeNames | None:
    """Of a model of text and images, loaded under its own names: those that adapters of older trainers have."""
    if model.config.get_text_config() is model.config:
        return None
    text, known = text_path(model), renamings(model)
    layers = f"{text}.layers.0"
    theirs = next((each for each in _OLDER_TEXTS if renamed(f"{each}.layers.0", known) == layers and each != text), "")
    if not theirs:
        return None
    older = {path: path.removeprefix("model.") for path in left_out}
    others = tuple(each if renamed(each, known) == path else path for path, each in older.items())
    return WholeNames(ours=text, theirs=theirs, left_out=others)


def text_path(model: PreTrainedModel) -> str:
    return _path_of(model, model.get_decoder())


def _path_of(model: nn.Module, part: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is part)
