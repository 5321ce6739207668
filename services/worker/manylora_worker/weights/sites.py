"""Where LoRA attaches to a base model, and an adapter's matrices at these places. All of it is immutable."""

# A *site* is one matrix product of the base model: a linear layer, or fused ones (q, k, v). The model's own layers are
# its *slots*: slot i makes the columns [start, stop) of the output. An adapter has A stacked over a site's slots and
# one B a slot, scaled by alpha / r already. Nothing is padded to a common rank. With tensor parallelism a rank has its
# share of a layer's outputs (B is cut, A whole) or of its inputs (A is cut, B whole).
#
# The experts of a layer are one site a projection, whose slots are those of expert 0, then those of expert 1, and so
# on. No product makes all of its columns: a row computes those of the experts that it goes to. There, and only there,
# ranks are padded: all slots of an adapted site have the adapter's largest rank in it.

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_rope import RopeScaling
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    path: str
    start: int
    stop: int
    outputs: tuple[range, ...] = ()  # of the layer's, those in its columns, part by part; empty: all of them


@dataclass(frozen=True)
class Site:
    index: int
    in_features: int
    slots: tuple[Slot, ...]
    first_input: int = 0  # of the layers' inputs, of which there are `in_features` here
    experts: int = 0  # 0: it is one product

    @property
    def slots_an_expert(self) -> int:
        return len(self.slots) // self.experts

    @property
    def expert_columns(self) -> int:
        return self.slots[-1].stop // self.experts


@dataclass(frozen=True)
class WholeNames:
    """Of a model of text and images whose text part alone is served: how the whole model names what is here, or how an
    older transformers named it.
    """

    ours: str  # the text part's path
    theirs: str
    left_out: tuple[str, ...]  # the other parts' paths

    def is_meant(self, paths: Iterable[str]) -> bool:
        told = list(paths)
        if self.ours.startswith(f"{self.theirs}.") and any(path.startswith(f"{self.ours}.") for path in told):
            return False
        return any(path.startswith(f"{self.theirs}.") for path in told)

    def path(self, path: str) -> str:
        is_inside = path == self.ours or path.startswith(f"{self.ours}.")
        return f"{self.theirs}{path[len(self.ours) :]}" if is_inside else path

    def own_path(self, path: str) -> str:  # the other way
        is_inside = path == self.theirs or path.startswith(f"{self.theirs}.")
        return f"{self.ours}{path[len(self.theirs) :]}" if is_inside else path

    def renamed(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """told: an AdapterBase's fields. Those that have paths, with the whole model's."""
        by_path = {name: {self.path(k): v for k, v in told[name].items()} for name in ("modules", "experts")}
        sets = {name: frozenset(map(self.path, told[name])) for name in ("head_modules", "other_modules", "biased")}
        sites = [
            replace(site, slots=tuple(replace(slot, path=self.path(slot.path)) for slot in site.slots))
            for site in told["sites"]
        ]
        tokens: TokenBase = told["tokens"]
        tokens = replace(tokens, embeddings=self.path(tokens.embeddings), head=self.path(tokens.head))
        return {**by_path, **sets, "sites": sites, "tokens": tokens, "head": self.path(told["head"])}


@dataclass(frozen=True)
class ExpertShape:
    """Of a layer's experts: `gate_up_proj` [experts, 2 * width, hidden] and `down_proj` [experts, hidden, width].

    in_turn: an output of the gate, then one of `up`, and so on, in place of all the gate's first; the stacks of such
    a model are transposed, and it has no layer an expert that an adapter could name.
    """

    experts: int
    hidden: int
    width: int
    top_k: int  # that a row goes to
    in_turn: bool = False


@dataclass(frozen=True)
class TokenBase:
    """The base model's input embeddings and output head, of which an adapter may bring some tokens' rows."""

    embeddings: str = ""  # path
    head: str = ""  # path
    num_tokens: int = 0
    width: int = 0
    is_tied: bool = False  # the head is the embeddings
    problem: str = "is not served"  # empty: it is


@dataclass(frozen=True)
class TokenRows:
    ids: Tensor  # int64 [n]
    rows: Tensor  # [n, width], in the place of the base model's
    embeds: bool  # of the input embeddings
    heads: bool  # of the head


@dataclass(frozen=True)
class SlotWeights:
    """Columns [start, stop) of the site's stacked A product -> the slot's output columns."""

    slot: int
    start: int
    stop: int
    b: Tensor  # [rank, out], scaled


@dataclass(frozen=True)
class SlotColumns:
    """What is done with a slot's outputs, LoRA's included: times `gain`, plus `shift`, [out] each."""

    slot: int
    gain: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True)
class SiteWeights:
    a_t: Tensor  # [in, sum of the slots' ranks]: A of all slots side by side, transposed (a view)
    slots: tuple[SlotWeights, ...]  # in order of columns, without gaps
    ranks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", [slot.stop - slot.start for slot in self.slots])


class _Shape:
    """A tuple, hashed once: it is a key in every step."""

    def __init__(self, parts: tuple[object, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and (self is other or self._parts == other._parts)


@dataclass(frozen=True)
class DeviceAdapter:
    """By site index; sites that it does not touch are absent."""

    uid: AdapterUid
    sites: Mapping[int, SiteWeights]
    size_bytes: int
    rope: RopeScaling | None = None
    columns: Mapping[int, tuple[SlotColumns, ...]] = field(default_factory=dict)  # by site index
    experts: Mapping[int, SiteWeights] = field(default_factory=dict)  # as `sites`, of layers' experts
    tokens: tuple[TokenRows, ...] = ()

    num_sites: int = field(init=False)
    num_slots: int = field(init=False)  # over all sites
    num_weights: int = field(init=False)
    shape: Hashable = field(init=False, repr=False)  # equal for adapters with the same ranks on the same layers

    def __post_init__(self) -> None:
        sites = self.sites.values()
        shape = tuple((i, tuple((s.slot, s.stop - s.start) for s in site.slots)) for i, site in self.sites.items())
        object.__setattr__(self, "shape", _Shape(shape))
        object.__setattr__(self, "num_sites", len(sites))
        object.__setattr__(self, "num_slots", sum(len(site.slots) for site in sites))
        object.__setattr__(
            self, "num_weights", sum(site.a_t.numel() + sum(s.b.numel() for s in site.slots) for site in sites)
        )

    def weights(self) -> Iterator[Tensor]:
        for site in (*self.sites.values(), *self.experts.values()):
            yield site.a_t
            yield from (slot.b for slot in site.slots)
        yield from (each.rows for each in self.tokens)
        for slots in self.columns.values():
            yield from (tensor for each in slots for tensor in (each.gain, each.shift) if tensor is not None)
