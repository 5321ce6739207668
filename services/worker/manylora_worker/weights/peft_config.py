"""What an adapter_config.json means: its fields checked, and peft's rules of which module gets which rank and scale.

Owns nothing. The rules restate peft 0.21 (check_target_module_exists, get_pattern_key, LoraConfig.__post_init__); the
numerics tests compare them with peft itself. Patterns are a tenant's input: peft/patterns.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manylora_shared.errors import FieldViolation, ManyloraError, shown
from manylora_shared.stores.model_files import model_name

from manylora_worker.weights.peft.patterns import (
    LAYER_GROUP,
    FirstOf,
    Matching,
    PatternCheck,
    as_it_is,
    of_key,
    of_layers,
)
from manylora_worker.weights.sites import TokenBase

MAX_NAMES = 4096  # of a list, and of the patterns of a map
MAX_TRAINED_TOKENS = 256  # of embeddings or head: each row's token is looked for among them
MAX_TOLD_CHARS = 400  # of what a problem's field and description say each; both may quote the file

_HONOURED = frozenset(
    {
        "alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_bias", "peft_type", "r", "rank_pattern", "rope_parameters",
        "rope_scaling", "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora",
        "use_rslora",
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    {
        # Training and bookkeeping; fan_in_fan_out only says how a merge would lay the base weight out.
        "auto_mapping", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "velora_config",
    }
)  # fmt: skip
_NAMELESS = re.compile(r"\.{1,2}|checkpoint-[0-9]+|[0-9a-f]{40}")
_QUANTIZED = re.compile(r"(-unsloth)?-bnb-4bit$")
_REFUSED = {
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
}
_WHOLE = (
    "modules trained as a whole are not served. A head or embeddings of an adapter's own take more memory than all of "
    "its other weights, and norms of its own no kernel reads: train some tokens' rows (trainable_token_indices), or "
    "LoRA on lm_head; or merge the adapter (merge_and_unload) and serve what comes out as a base model"
)
_UNUSED = "is not a LoRA A or B matrix of a linear layer, and nothing else can be used"
_COPIED = (
    "is a copy of the base model's own layer, which PEFT saves beside LoRA on it, and nothing would use: save the "
    "adapter with save_pretrained(..., save_embedding_layers=False)"
)
TOKENS_KEY = "trainable_token_indices"
_BIASES = ("none", "lora_only", "all")
_INITIALIZATIONS_ON_THE_BASE_AS_IT_IS = (True, False, None, "gaussian", "eva", "orthogonal")


def unused(key: str) -> str:
    """What is wrong with a tensor that is nothing of LoRA's."""
    return _COPIED if key.endswith(".base_layer.weight") else _UNUSED


@dataclass(frozen=True)
class LoraSettings:
    """A config's LoRA part, valid in itself."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool = False
    lora_bias: bool = False
    trains_biases: bool = False  # of the base model
    target_parameters: tuple[str, ...] = ()  # weights, by the end of their names
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by the end of a path; "": the embeddings'

    @property
    def has_vectors(self) -> str:
        """The field that brings numbers by output; empty: none does."""
        told = (("use_dora", self.use_dora), ("lora_bias", self.lora_bias), ("bias", self.trains_biases))
        return next((name for name, is_set in told if is_set), "")


@dataclass
class Problems:
    """Why an adapter is refused, in the order found."""

    violations: list[FieldViolation] = field(default_factory=list)

    def add(self, field_name: str, description: str) -> None:
        self.violations.append(FieldViolation(_cut(field_name), _cut(description)))

    def add_all(self, error: ManyloraError, field_name: str) -> None:
        """`field_name`: where the error names no field."""
        self.violations += error.violations or [FieldViolation(field_name, _cut(error.message))]

    def first(self, most: int) -> list[FieldViolation]:
        """The last one says how many more there are."""
        found = self.violations
        if len(found) <= most:
            return found
        return [*found[: most - 1], FieldViolation("adapter", f"... and {len(found) - most + 1} more problems")]


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TOLD_CHARS else f"{text[:MAX_TOLD_CHARS]}... ({len(text)} characters)"


class ModuleMatcher:
    """Applies one config's patterns to module paths, on the thread that made it. Its methods raise as Matching does."""

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self._matching = matching = Matching()
        self._targeted = frozenset(settings.target_modules)
        self._excluded = frozenset(settings.exclude_modules)
        self._parameters = frozenset(settings.target_parameters)
        self._ranks, self._alphas = list(settings.rank_pattern.values()), list(settings.alpha_pattern.values())
        self._first_rank = FirstOf("rank_pattern", settings.rank_pattern, matching)
        self._first_alpha = FirstOf("alpha_pattern", settings.alpha_pattern, matching)
        self._layers = [of_layers(prefix) for prefix in settings.layers_pattern or ("",)]

    def is_targeted(self, path: str, *, is_linear: bool) -> bool:
        """Whether peft would put an adapter on the module. is_linear: a linear layer other than the head."""
        settings = self._settings
        exclude = settings.exclude_modules
        if isinstance(exclude, str):
            if exclude and self._matching.is_all_of("exclude_modules", exclude, path):
                return False
        elif _is_named(path, self._excluded):
            return False
        targets = settings.target_modules
        if isinstance(targets, str):
            if targets.lower() == "all-linear":
                return is_linear
            return self._matching.is_all_of("target_modules", targets, path)
        if path in self._targeted:
            return True
        return _is_named(path, self._targeted) and self._is_layer_wanted(path)

    def is_parameter_targeted(self, name: str) -> bool:
        return _is_named(name, self._parameters)

    def rank_and_scale(self, path: str) -> tuple[int, float]:
        """The scale is alpha / r, or alpha / sqrt(r) with rsLoRA."""
        settings = self._settings
        rank_at, alpha_at = self._first_rank(path), self._first_alpha(path)
        rank = settings.rank if rank_at is None else self._ranks[rank_at]
        alpha = settings.alpha if alpha_at is None else self._alphas[alpha_at]
        return rank, alpha / (math.sqrt(rank) if settings.use_rslora else rank)

    def _is_layer_wanted(self, path: str) -> bool:
        wanted = self._settings.layers_to_transform
        if not wanted:
            return True
        matches = (self._matching.match("layers_pattern", pattern, path) for pattern in self._layers)
        first = next((match for match in matches if match is not None), None)
        # with `|` in the pattern, what is before it may match without a layer's number
        return first is not None and first[LAYER_GROUP] is not None and int(first[LAYER_GROUP]) in wanted


def _is_named(path: str, names: frozenset[str]) -> bool:
    """By the whole path, or by its end behind a dot."""
    while path:
        if path in names:
            return True
        path = path.partition(".")[2]
    return False


def parse_settings(
    config: Mapping[str, Any], *, base_names: Sequence[str], max_rank: int, problems: Problems
) -> LoraSettings | None:
    """None where the config's own values are unusable; `problems` then says why.

    Args:
        base_names: the names under which the served base model may be meant.
        max_rank: largest rank served.
    """
    before = len(problems.violations)
    patterns = PatternCheck()
    _check_identity(config, base_names, problems)
    _check_unsupported(config, problems)
    rank = _rank(config.get("r", 8), "r", max_rank, problems)
    alpha = _finite(config.get("lora_alpha", 8), "lora_alpha", problems)
    ranks = _pattern_map(config, "rank_pattern", patterns, problems)
    alphas = _pattern_map(config, "alpha_pattern", patterns, problems)
    rank_pattern = {k: _rank(v, f"rank_pattern[{k}]", max_rank, problems) for k, v in ranks.items()}
    alpha_pattern = {k: _finite(v, f"alpha_pattern[{k}]", problems) for k, v in alphas.items()}
    flags = {name: _flag(config, name, problems) for name in ("use_rslora", "use_dora", "lora_bias")}
    bias = _bias(config, flags, problems)
    targets = _names_or_pattern(config, "target_modules", patterns, problems)
    parameters, tokens = _parameters(config, problems), _tokens(config, problems)
    if targets is None and parameters:
        targets = ()
    if targets is None:
        problems.add("target_modules", "must name modules, or be a pattern or 'all-linear'")
    excludes = _names_or_pattern(config, "exclude_modules", patterns, problems)
    layers, layers_pattern = _layers(config, targets, patterns, problems)
    if len(problems.violations) > before and not (rank and targets is not None):
        return None
    assert targets is not None
    return LoraSettings(
        rank=rank,
        alpha=alpha,
        use_rslora=flags["use_rslora"],
        use_dora=flags["use_dora"],
        lora_bias=flags["lora_bias"],
        trains_biases=bias != "none",
        rank_pattern={k: v for k, v in rank_pattern.items() if v},
        alpha_pattern=alpha_pattern,
        target_modules=targets,
        exclude_modules=excludes or (),
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
        target_parameters=parameters,
        tokens=tokens,
    )


def _parameters(config: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    value = config.get("target_parameters") or []
    if isinstance(value, list) and len(value) <= MAX_NAMES and all(isinstance(item, str) for item in value):
        return tuple(value)
    problems.add("target_parameters", f"must be a list of names, {MAX_NAMES} at most")
    return ()


def _tokens(config: Mapping[str, Any], problems: Problems) -> dict[str, tuple[int, ...]]:
    value = config.get(TOKENS_KEY) or {}
    named = {"": value} if isinstance(value, list) else value
    if not isinstance(named, dict) or not all(map(_are_tokens, named.values())):
        problems.add(
            TOKENS_KEY, f"must be a list of {MAX_TRAINED_TOKENS} token ids at most, each once, or such by module"
        )
        return {}
    return {str(name): tuple(ids) for name, ids in named.items()}


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_TRAINED_TOKENS
        and all(type(each) is int and each >= 0 for each in value)
        and len(set(value)) == len(value)
    )


@dataclass(frozen=True)
class TrainedTokens:
    path: str
    ids: tuple[int, ...]
    embeds: bool
    heads: bool


def trained_tokens(
    settings: LoraSettings, base: TokenBase, shapes: Mapping[str, tuple[int, ...]], problems: Problems
) -> list[TrainedTokens]:
    """As peft takes them: of a tied model the embeddings' are the head's too, unless it has others. shapes: by path, of
    what the file has.
    """
    tokens = _told_tokens(settings, base, problems)
    fitting = {each.path: (len(each.ids), base.width) for each in tokens}
    for path in sorted(shapes.keys() ^ fitting.keys()) if not problems.violations else ():
        problems.add(
            TOKENS_KEY, f"tells of tokens of {path}, for which there are no rows, or not of those that there are"
        )
    for path in sorted(shapes.keys() & fitting.keys()):
        if shapes[path] != fitting[path]:
            problems.add(
                path, f"has shape {list(shapes[path])}, but {list(fitting[path])} fits its tokens and the base"
            )
    return [each for each in tokens if shapes.get(each.path) == fitting[each.path]]


def _told_tokens(settings: LoraSettings, base: TokenBase, problems: Problems) -> list[TrainedTokens]:
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in settings.tokens.items():
        paths = [path for path in (base.embeddings, base.head) if f".{path}".endswith(f".{name}")]
        path = base.embeddings if not name else paths[0] if paths else ""
        if base.problem:
            problems.add(TOKENS_KEY, base.problem)
        elif not path:
            problems.add(TOKENS_KEY, f"names {shown(name)}, neither the embeddings nor the output head")
        elif max(ids) >= base.num_tokens:
            problems.add(
                TOKENS_KEY, f"has token {max(ids)}, but the base model's vocabulary ends at {base.num_tokens - 1}"
            )
        else:
            found[path] = ids
    own, heads = found.get(base.embeddings), found.get(base.head)
    is_shared = base.is_tied and own is not None and heads in (None, own)
    tokens = [] if own is None else [TrainedTokens(base.embeddings, own, True, is_shared)]
    return tokens if heads is None or is_shared else [*tokens, TrainedTokens(base.head, heads, False, True)]


def _check_identity(config: Mapping[str, Any], base_names: Sequence[str], problems: Problems) -> None:
    if config.get("peft_type") != "LORA":
        problems.add("peft_type", f"must be 'LORA', not {config.get('peft_type')!r}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        problems.add("task_type", f"must be 'CAUSAL_LM' or absent, not {config['task_type']!r}")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        problems.add("base_model_name_or_path", "must be a string")
    elif base:
        meant = _family(base)
        if base not in base_names and meant and meant not in map(_family, base_names):
            problems.add(
                "base_model_name_or_path",
                f"made for {shown(base)}, but {base_names[0]!r} is served; if they are the same model, "
                "set it to null, or give the workers --model-alias",
            )


def _family(name: str) -> str:
    """What of a trainer's free text names a model: as quantized, of any case. Empty: nothing does."""
    last = model_name(name).lower()
    return "" if _NAMELESS.fullmatch(last) else _QUANTIZED.sub("", last)


def _check_unsupported(config: Mapping[str, Any], problems: Problems) -> None:
    for name, reason in _REFUSED.items():
        value = config.get(name)
        if value:
            problems.add(name, reason)
    whole = config.get("modules_to_save")
    if whole:
        names = some_of(list(map(str, whole))) if isinstance(whole, list) else shown(str(whole))
        problems.add("modules_to_save", f"{names}: {_WHOLE}")
    if config.get("init_lora_weights", True) not in _INITIALIZATIONS_ON_THE_BASE_AS_IT_IS:
        problems.add(
            "init_lora_weights",
            f"{config['init_lora_weights']!r} changes the base model's weights; convert the adapter to plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)",
        )
    known = _HONOURED | _WITHOUT_EFFECT | _REFUSED.keys() | {"modules_to_save"}
    for name in sorted(set(config) - known, key=str):
        if config[name]:
            problems.add(name, "this field is not supported with a value other than its default")


def _rank(value: Any, name: str, max_rank: int, problems: Problems) -> int:
    """0 where it cannot be served."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        problems.add(name, f"must be a whole number of at least 1, not {value!r}")
    elif value > max_rank:
        problems.add(name, f"rank {value} is over the limit of {max_rank}")
    else:
        return value
    return 0


def _finite(value: Any, name: str, problems: Problems) -> float:
    """0 where it is not finite."""
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 1e30:
        return float(value)
    problems.add(name, "must be a finite number")
    return 0.0


def _flag(config: Mapping[str, Any], name: str, problems: Problems) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        problems.add(name, "must be true or false")
    return value is True


def _bias(config: Mapping[str, Any], flags: Mapping[str, bool], problems: Problems) -> str:
    value = config.get("bias") or "none"
    if value not in _BIASES:
        problems.add("bias", f"must be one of {', '.join(_BIASES)}, not {shown(str(value))}")
    if flags["use_dora"] and flags["lora_bias"]:
        problems.add("lora_bias", "goes not with use_dora")
    return str(value)


def _pattern_map(config: Mapping[str, Any], name: str, patterns: PatternCheck, problems: Problems) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        problems.add(name, "must map patterns to numbers")
        return {}
    if len(value) > MAX_NAMES:
        problems.add(name, f"has {len(value)} patterns, more than {MAX_NAMES}")
        return {}
    found = {}
    for key, number in value.items():
        problem = patterns.problem(key, of_key)
        if problem is None:
            found[key] = number
        else:
            problems.add(name, f"{shown(key)} {problem}")
    return found


def _names_or_pattern(
    config: Mapping[str, Any], name: str, patterns: PatternCheck, problems: Problems
) -> str | tuple[str, ...] | None:
    """A pattern, a tuple of names, or None where the field is absent or wrong."""
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        problem = None if value.lower() == "all-linear" else patterns.problem(value, as_it_is)
        if problem is None:
            return value
        problems.add(name, f"{shown(value)} {problem}")
    elif isinstance(value, list) and len(value) > MAX_NAMES:
        problems.add(name, f"has {len(value)} names, more than {MAX_NAMES}")
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    else:
        problems.add(name, "must be a list of names or a pattern")
    return None


def _layers(
    config: Mapping[str, Any], targets: str | tuple[str, ...] | None, patterns: PatternCheck, problems: Problems
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    if isinstance(targets, str):
        for name, value in (("layers_to_transform", layers), ("layers_pattern", pattern)):
            if value is not None:
                problems.add(name, "cannot be combined with a target_modules pattern")
    if pattern and layers is None:
        problems.add("layers_pattern", "needs layers_to_transform")
    indices = [layers] if isinstance(layers, int) else layers
    if indices is not None and not (
        isinstance(indices, list)
        and len(indices) <= MAX_NAMES
        and all(isinstance(i, int) and not isinstance(i, bool) for i in indices)
    ):
        problems.add("layers_to_transform", f"must be a layer index or a list of {MAX_NAMES} at most")
        indices = None
    names = [pattern] if isinstance(pattern, str) else pattern or []
    if not isinstance(names, list) or len(names) > MAX_NAMES:
        problems.add("layers_pattern", f"must be a pattern or a list of {MAX_NAMES} at most")
        names = []
    told = [patterns.problem(item, of_layers) for item in names]
    for index, problem in enumerate(told):
        if problem is not None:
            problems.add("layers_pattern", f"its pattern {index} {problem}")
    usable = tuple(name for name, problem in zip(names, told, strict=True) if name and problem is None)
    return (None if indices is None else tuple(indices)), usable
