"""Mixtures of experts in a base model: found by the shape of their parts, and taken over where ours compute alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from manylora_shared.errors import InvalidRequest
from torch import Tensor, nn
from transformers import PreTrainedModel

from manylora_worker.models.layers.lora_linear import LoraLinear, LoraSwitch
from manylora_worker.models.layers.mixture import (
    CLAMP_ALPHA,
    CLAMP_LIMIT,
    LoraExperts,
    LoraRouter,
    Routing,
    clamped_swiglu,
)
from manylora_worker.models.quantized.stacks import rebuilt, stacks_in
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.weights.layout import VectorKind
from manylora_worker.weights.peft_config import ModuleMatcher
from manylora_worker.weights.sites import ExpertShape, Site, Slot
from manylora_worker.weights.stacked import DOWN, GATE_UP, stacks_of

_LOG = logging.getLogger(__name__)
_CHECKED_ROWS = 5
_STACKS = frozenset({GATE_UP, DOWN})
_BIASES = frozenset({f"{GATE_UP}_bias", f"{DOWN}_bias"})
_CHOICE_BIAS = "e_score_correction_bias"  # DeepSeek's; GLM's routers have it, too


@dataclass(frozen=True)
class FoundExperts:
    """path: of the block that has `experts` and a router of that name; empty: its router is not ours."""

    path: str
    shape: ExpertShape
    router_name: str

    @property
    def stack(self) -> str:
        return f"{self.path}.experts"

    @property
    def router(self) -> str:
        return f"{self.path}.{self.router_name}"

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """As linears.linear_modules, of what stands in the experts' stacked weights."""
        hidden, width = self.shape.hidden, self.shape.width
        shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        experts = range(self.shape.experts)
        return {f"{self.stack}.{expert}.{name}": shape for expert in experts for name, shape in shapes.items()}


def whole_experts(found: list[FoundExperts], group: RankGroup | None) -> list[FoundExperts]:
    """found: a rank's share. The whole that it is of."""
    size = 1 if group is None else group.size
    return [replace(each, shape=replace(each.shape, width=size * each.shape.width)) for each in found]


def find_experts(model: PreTrainedModel) -> list[FoundExperts]:
    config = model.config.get_text_config()
    found = []
    for path, block in model.named_modules():
        name = next((each for each in ("gate", "router") if hasattr(block, each)), "")
        router, experts = getattr(block, name, None), getattr(block, "experts", None)
        top_k = getattr(router, "top_k", getattr(config, "top_k_experts", None))
        if not isinstance(router, nn.Module) or not isinstance(experts, nn.Module) or not isinstance(top_k, int):
            continue
        shape = _shape(experts, top_k) or _shape_in_turn(experts, top_k)
        if shape is not None and (_is_known(router, shape) or not shape.in_turn):
            found.append(FoundExperts(path, shape, name if _is_known(router, shape) else ""))
    return found


def router_linears(model: PreTrainedModel) -> frozenset[str]:
    """Paths of linear layers of routers that are not ours: `--quantization` leaves them as they are."""
    blocks = [(path, block) for path, block in model.named_modules() if hasattr(block, "experts")]
    routers = [f"{path}.{name}" for path, block in blocks for name in ("gate", "router") if hasattr(block, name)]
    return frozenset(
        path
        for router in routers
        for path, module in model.get_submodule(router).named_modules(prefix=router)
        if isinstance(module, nn.Linear | LoraLinear)
    )


def _is_known(router: nn.Module, shape: ExpertShape) -> bool:
    own = {name: tuple(each.shape) for name, each in router.named_parameters()}
    weight = {"weight": (shape.experts, shape.hidden)}
    if shape.in_turn:
        return own == {**weight, "bias": (shape.experts,)}
    return own == weight


def _shape(experts: nn.Module, top_k: int) -> ExpertShape | None:
    weights = stacks_in(experts)
    if weights.keys() != _STACKS or not hasattr(experts, "act_fn"):
        return None
    if any(len(each.shape) != 3 for each in weights.values()):
        return None
    count, hidden, width = weights[DOWN].shape
    return ExpertShape(count, hidden, width, top_k) if weights[GATE_UP].shape == (count, 2 * width, hidden) else None


def _shape_in_turn(experts: nn.Module, top_k: int) -> ExpertShape | None:
    """gpt-oss."""
    shapes = {name: tuple(each.shape) for name, each in experts.named_parameters()}
    constants = [getattr(experts, name, None) for name in ("alpha", "limit")]
    if shapes.keys() != _STACKS | _BIASES or constants != [CLAMP_ALPHA, CLAMP_LIMIT] or len(shapes[DOWN]) != 3:
        return None
    count, width, hidden = shapes[DOWN]
    wanted = {
        GATE_UP: (count, hidden, 2 * width), f"{GATE_UP}_bias": (count, 2 * width),
        DOWN: (count, width, hidden), f"{DOWN}_bias": (count, hidden),
    }  # fmt: skip
    return ExpertShape(count, hidden, width, top_k, in_turn=True) if shapes == wanted else None


def modules_of(found: list[FoundExperts]) -> dict[str, tuple[int, int]]:
    """Routers that are ours and experts, as linears.linear_modules."""
    modules: dict[str, tuple[int, int]] = {}
    for each in found:
        router = {each.router: (each.shape.hidden, each.shape.experts)} if each.router_name else {}
        modules |= {**router, **each.modules}
    return modules


def install_mixtures(
    model: PreTrainedModel,
    found: list[FoundExperts],
    first_site: int,
    switch: LoraSwitch,
    group: RankGroup | None = None,
) -> list[Site]:
    """To be the last of the model's sites: routers', then experts'."""
    sites = _install_routers(model, found, first_site, switch)
    return sites + _install_experts(model, found, first_site + len(sites), switch, group)


def _install_routers(
    model: PreTrainedModel, found: list[FoundExperts], first_site: int, switch: LoraSwitch
) -> list[Site]:
    sites: list[Site] = []
    for each in found:
        if not each.router_name:
            continue
        block, shape = model.get_submodule(each.path), each.shape
        site = Site(first_site + len(sites), shape.hidden, (Slot(each.router, 0, shape.experts),))
        setattr(block, each.router_name, _router(getattr(block, each.router_name), site, switch))
        sites.append(site)
    return sites


def _router(router: nn.Module, site: Site, switch: LoraSwitch) -> LoraRouter:
    """A softmax of the chosen logits alone is one of all whose shares are normalized."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = router.weight.shape
    linear.weight = router.weight
    linear.bias = getattr(router, "bias", None)
    first = router(router.weight[:1])[0]  # logits, or experts where its block takes them first
    return LoraRouter(LoraLinear(linear, site, switch), _routing(router), experts_first=not first.is_floating_point())


def _routing(router: nn.Module) -> Routing:
    normalizes = bool(getattr(router, "norm_topk_prob", True))
    bias = getattr(router, _CHOICE_BIAS, None)
    if bias is None:
        return Routing(router.top_k, normalizes)
    scales = torch.full_like(bias, router.routed_scaling_factor, dtype=torch.float32)
    return Routing(router.top_k, normalizes, is_sigmoid=True, choice_bias=bias.float(), scales=scales)


def _install_experts(
    model: PreTrainedModel, found: list[FoundExperts], first_site: int, switch: LoraSwitch, group: RankGroup | None
) -> list[Site]:
    rank = 0 if group is None else group.rank
    sites: list[Site] = []
    for each in found:
        block, shape = model.get_submodule(each.path), each.shape
        index = first_site + len(sites)
        own = (_gate_up_site(index, each.stack, shape, rank), _down_site(index + 1, each.stack, shape, rank))
        block.experts = _experts(block.experts, shape, own, switch)
        block.experts.reduce = None if group is None else group.all_reduce
        sites += own
    return sites


def _experts(experts: nn.Module, shape: ExpertShape, sites: tuple[Site, Site], switch: LoraSwitch) -> LoraExperts:
    if not shape.in_turn:
        gated = partial(_gated, experts.act_fn)
        return LoraExperts(experts.gate_up_proj, experts.down_proj, gated, sites, switch)
    gate_up = _apart(experts.gate_up_proj.data.transpose(1, 2))
    down = _frozen(experts.down_proj.data.transpose(1, 2))
    biases = (_apart(experts.gate_up_proj_bias.data), experts.down_proj_bias)
    return LoraExperts(gate_up, down, clamped_swiglu, sites, switch, biases)


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _apart(in_turn: Tensor) -> nn.Parameter:
    """[experts, 2 * width, ...]: all of the gate's, then all of up's."""
    return _frozen(torch.cat((in_turn[:, ::2], in_turn[:, 1::2]), dim=1))


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def _gate_up_site(index: int, stack: str, shape: ExpertShape, rank: int = 0) -> Site:
    names, width = ("gate_proj", "up_proj"), shape.width
    outputs = (range(rank * width, (rank + 1) * width),)
    slots = [
        Slot(f"{stack}.{expert}.{name}", (2 * expert + i) * width, (2 * expert + i + 1) * width, outputs)
        for expert in range(shape.experts)
        for i, name in enumerate(names)
    ]
    return Site(index, shape.hidden, tuple(slots), experts=shape.experts)


def _down_site(index: int, stack: str, shape: ExpertShape, rank: int = 0) -> Site:
    hidden = shape.hidden
    slots = [
        Slot(f"{stack}.{expert}.down_proj", expert * hidden, (expert + 1) * hidden) for expert in range(shape.experts)
    ]
    return Site(index, shape.width, tuple(slots), rank * shape.width, experts=shape.experts)


def taken_over(model: PreTrainedModel, found: list[FoundExperts]) -> list[FoundExperts]:
    """Those that ours compute as transformers does, and their routers where they do, too: one of each kind is tried."""
    routers: dict[type[nn.Module], str | None] = {}
    taken = []
    for each in found:
        block = model.get_submodule(each.path)
        kind = type(block)
        if kind not in routers:
            names = dict.fromkeys((each.router_name, ""))
            routers[kind] = next((n for n in names if _computes_alike(block, replace(each, router_name=n))), None)
            if routers[kind] != each.router_name:
                what = each.path if routers[kind] is None else f"the router of {each.path}"
                _LOG.warning("%s is none as we know it: it runs as transformers wrote it, without adapters", what)
        name = routers[kind]
        if name is not None:
            taken.append(replace(each, router_name=name))
    return taken


def _computes_alike(block: nn.Module, found: FoundExperts) -> bool:
    experts, router = block.experts, getattr(block, found.router_name) if found.router_name else None
    if getattr(router, "topk_group", 1) != getattr(router, "num_group", 1):
        return False  # groups of experts are left out: so few rows may not show it
    weight = experts.down_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _CHECKED_ROWS, found.shape.hidden, generator=generator).to(weight.device, weight.dtype)
    switch = LoraSwitch()
    own = (_gate_up_site(0, "", found.shape), _down_site(1, "", found.shape))
    ours = _experts(experts, found.shape, own, switch)
    with torch.inference_mode(), rebuilt(experts):
        try:
            if router is None:
                chosen = torch.arange(_CHECKED_ROWS * found.shape.top_k, device=weight.device) % found.shape.experts
                chosen = chosen.view(_CHECKED_ROWS, -1)
                shares = torch.rand(chosen.shape, generator=generator).to(weight.device)
                expected, got = (_result(each(x[0], chosen, shares)) for each in (experts, ours))
            else:
                expected = _result(block(x))
                block.experts = ours
                setattr(block, found.router_name, _router(router, Site(0, found.shape.hidden, ()), switch))
                got = _result(block(x))
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            return False
        finally:
            block.experts = experts
            if router is not None:
                setattr(block, found.router_name, router)
    tolerance = 1e-4 if weight.dtype is torch.float32 else 0.05
    return bool((got - expected).norm() <= tolerance * expected.norm())


def _result(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).float()


def expert_linear(model: PreTrainedModel, path: str, stacks: Mapping[str, ExpertShape]) -> nn.Linear | None:
    """An expert's layer by its path, over its part of a stack; None: the path is of no expert."""
    parent, _, leaf = path.rpartition(".")
    stack, _, expert = parent.rpartition(".")
    shape = stacks.get(stack)
    if shape is None or shape.in_turn or not expert.isdecimal() or int(expert) >= shape.experts:
        return None
    experts = model.get_submodule(stack)
    parts = {
        "gate_proj": experts.gate_up_proj.data[int(expert), : shape.width],
        "up_proj": experts.gate_up_proj.data[int(expert), shape.width :],
        "down_proj": experts.down_proj.data[int(expert)],
    }
    if leaf not in parts:
        return None
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = nn.Parameter(parts[leaf], requires_grad=False)
    return linear


def merge_stacks(
    model: PreTrainedModel,
    stacks: Mapping[str, ExpertShape],
    parts: Mapping[str, Mapping[str | VectorKind, Tensor]],
    matcher: ModuleMatcher,
) -> None:
    """Adds to stacked weights what of an adapter's `parts`, by path, is of whole stacks. Raises InvalidRequest."""
    for path, shape in stacks.items():
        names = [each for each in (GATE_UP, DOWN) if matcher.is_parameter_targeted(f"{path}.{each}")]
        for stack in stacks_of(path, shape, names):
            own = parts.get(stack.key, {})
            rank, scale = matcher.rank_and_scale(stack.name)
            shapes = {name: tuple(each.shape) for name, each in own.items()}
            if shapes != {name: stack.matrix_shape(name, rank) for name in "AB"}:
                raise InvalidRequest.of(stack.name, f"has matrices {shapes}, which do not fit")
            weights: Tensor = getattr(model.get_submodule(path), stack.parameter).data
            for expert, weight in enumerate(weights):
                a, b = own["A"][expert * rank : (expert + 1) * rank], own["B"][:, expert :: shape.experts]
                change = scale * (b.float() @ a.float())
                weight.copy_(weight.float() + (change.T if shape.in_turn else change))
