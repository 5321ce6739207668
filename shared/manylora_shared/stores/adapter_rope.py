"""The rotation of positions that an adapter was trained with, where it is not the base model's: LongLoRA and its kin.

It stands in the adapter's configuration as `rope_scaling`, in the form of transformers' `rope_parameters`, and so is
part of the adapter's digest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora_shared.errors import InvalidRequest, shown

ROPE_KEY = "rope_scaling"
TYPES = ("linear", "dynamic", "yarn", "llama3")
CONTEXT = "max_position_embeddings"  # how long a context may be, where that is more than the original times the factor
_ORIGINAL = "original_max_position_embeddings"
_MAX_FACTOR = 1024.0
_MAX_TOKENS = 1 << 24
_NEEDED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)}
_OPTIONAL = {
    "linear": (),
    "dynamic": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": (),
}
_COMMON = (CONTEXT, "rope_theta", "partial_rotary_factor")
_LENGTHS = frozenset({CONTEXT, _ORIGINAL})
Value = float | str | bool


@dataclass(frozen=True)
class RopeScaling:
    parameters: tuple[tuple[str, Value], ...]  # by name, `rope_type` among them
    max_context_tokens: int

    @property
    def text(self) -> str:
        """Equal for equal rotations."""
        return json.dumps(dict(self.parameters), separators=(",", ":"))


@dataclass(frozen=True)
class BaseRope:
    """Of a base model, as far as adapters' own rotations need it."""

    own: Mapping[str, Any] = field(default_factory=dict)  # its rope_parameters
    original_tokens: int = 0  # the context that it was made for, before any scaling
    longest_tokens: int = 0  # that the cluster serves
    problem: str = ""  # why no adapter may bring its own; empty: it may
    problem_of: Callable[[RopeScaling], str] | None = None  # what is wrong with the frequencies that come of one

    def scaling_of(self, config: Mapping[str, Any]) -> RopeScaling | None:
        """What an adapter's configuration asks for; None: the base model's own. Raises ValueError: it cannot be."""
        found = config.get(ROPE_KEY) or config.get("rope_parameters")
        if not found:
            return None
        parameters = parsed(found)
        kind = parameters["rope_type"]
        given = {name: value for name, value in parameters.items() if name != CONTEXT}
        if all(self.own.get(name, _DEFAULTS.get(name)) == value for name, value in given.items()):
            return None
        if kind not in TYPES:
            raise ValueError(f"rope_type {shown(str(kind))} is not served; {', '.join(TYPES)} are")
        if self.problem:
            raise ValueError(self.problem)
        if "partial_rotary_factor" in given and given["partial_rotary_factor"] != self.own.get(
            "partial_rotary_factor", 1.0
        ):
            raise ValueError("partial_rotary_factor: is not the base model's")
        original = int(given.get(_ORIGINAL, self.original_tokens))
        context = max(int(parameters.get(CONTEXT, 0)), int(original * float(given["factor"])))
        scaling = RopeScaling(tuple(sorted(given.items())), min(context, self.longest_tokens))
        if self.problem_of is not None and (problem := self.problem_of(scaling)):
            raise ValueError(problem)
        return scaling


_DEFAULTS = {"rope_type": "default"}


def parsed(value: Any) -> dict[str, Value]:
    """Checked in itself, under the names of today's transformers. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be an object, as transformers' rope_parameters")
    given = {("rope_type" if name == "type" else name): each for name, each in value.items() if each is not None}
    kind = given.get("rope_type", "default")
    if not isinstance(kind, str):
        raise ValueError("rope_type: must be a text")
    given["rope_type"] = kind
    if kind not in TYPES:
        return {name: each for name, each in given.items() if isinstance(each, str | bool | int | float)}
    needed = _NEEDED.get(kind, ("factor",))
    unknown = sorted(set(given) - {"rope_type", *needed, *_OPTIONAL[kind], *_COMMON})
    absent = [name for name in needed if name not in given]
    if unknown or absent:
        raise ValueError(
            f"{shown(unknown[0])} is not known of {kind}" if unknown else f"{absent[0]}: is missing for {kind}"
        )
    return {name: _value(name, each) for name, each in given.items()}


def _value(name: str, value: Any) -> Value:
    if name == "rope_type":
        return str(value)
    if name == "truncate":
        if not isinstance(value, bool):
            raise ValueError("truncate: must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name}: must be a number above 0")
    if name in _LENGTHS:
        if value != int(value) or value > _MAX_TOKENS:
            raise ValueError(f"{name}: must be a whole number of tokens, at most {_MAX_TOKENS}")
        return int(value)
    if name == "factor" and not 1 <= value <= _MAX_FACTOR:
        raise ValueError(f"factor: must be 1 to {_MAX_FACTOR:g}")
    return float(value)


def rope_text(text: str) -> str:
    """Of an option or a header's field, checked, as it is written into a configuration. Raises InvalidRequest."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest.of("rope", f"is not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest.of("rope", "has a number of too many digits, or nests too deep") from None
    try:
        return json.dumps(parsed(value), sort_keys=True)
    except ValueError as error:
        raise InvalidRequest.of("rope", str(error)) from None


def with_rope(config: Mapping[str, Any], rope: str) -> bytes:
    """An adapter's configuration with that rotation in the place of its own."""
    return json.dumps({**config, ROPE_KEY: json.loads(rope)}).encode()


def rope_beside(config: Mapping[str, Any]) -> str:
    """What a model's config.json beside an adapter says of its rotation, for the adapter's configuration; empty:
    nothing. Whether it is the base model's own is seen where that is known.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, Mapping) or any(isinstance(each, Mapping) for each in found.values()):
        return ""  # none, or one a layer type, which is that of the family
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return ""
    context = config.get(CONTEXT)
    more = {CONTEXT: context} if isinstance(context, int) and kind in TYPES else {}
    return json.dumps({**more, **found}, sort_keys=True)
