"""Mixtures of experts in a base model: found by the shape of their parts, and taken over where ours compute alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from manylora_shared.errors import InvalidRequest
from torch import Tensor, nn
from transformers import PreTrainedModel

from manylora_worker.models.layers.lora_linear import LoraLinear, LoraSwitch
from manylora_worker.models.layers.mixture import LoraExperts, LoraRouter
from manylora_worker.weights.layout import VectorKind
from manylora_worker.weights.peft_config import ModuleMatcher
from manylora_worker.weights.sites import ExpertShape, Site, Slot
from manylora_worker.weights.stacked import DOWN, GATE_UP, stacks_of

_LOG = logging.getLogger(__name__)
_CHECKED_ROWS = 5


@dataclass(frozen=True)
class FoundExperts:
    """path: of the block that has the router `gate` and `experts`."""

    path: str
    shape: ExpertShape

    @property
    def stack(self) -> str:
        return f"{self.path}.experts"

    @property
    def router(self) -> str:
        return f"{self.path}.gate"

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """As linears.linear_modules, of what stands in the experts' stacked weights."""
        hidden, width = self.shape.hidden, self.shape.width
        shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        experts = range(self.shape.experts)
        return {f"{self.stack}.{expert}.{name}": shape for expert in experts for name, shape in shapes.items()}


def find_experts(model: PreTrainedModel) -> list[FoundExperts]:
    found = []
    for path, block in model.named_modules():
        router = getattr(block, "gate", None)
        shape = _shape(getattr(block, "experts", None), getattr(router, "top_k", None))
        weight = getattr(router, "weight", None)
        if shape is None or not isinstance(weight, nn.Parameter) or not isinstance(router, nn.Module):
            continue
        is_known = hasattr(router, "norm_topk_prob") and len(list(router.parameters())) == 1
        if is_known and weight.shape == (shape.experts, shape.hidden):
            found.append(FoundExperts(path, shape))
    return found


def _shape(experts: object, top_k: object) -> ExpertShape | None:
    if not isinstance(experts, nn.Module) or not hasattr(experts, "act_fn") or not isinstance(top_k, int):
        return None
    weights = dict(experts.named_parameters())
    if weights.keys() != {"gate_up_proj", "down_proj"} or any(each.ndim != 3 for each in weights.values()):
        return None
    count, hidden, width = weights["down_proj"].shape
    if weights["gate_up_proj"].shape != (count, 2 * width, hidden):
        return None
    return ExpertShape(count, hidden, width, top_k)


def modules_of(found: list[FoundExperts]) -> dict[str, tuple[int, int]]:
    """Routers and experts, as linears.linear_modules."""
    modules: dict[str, tuple[int, int]] = {}
    for each in found:
        modules |= {each.router: (each.shape.hidden, each.shape.experts), **each.modules}
    return modules


def install_mixtures(
    model: PreTrainedModel, found: list[FoundExperts], first_site: int, switch: LoraSwitch
) -> list[Site]:
    """To be the last of the model's sites: routers', then experts'."""
    sites = _install_routers(model, found, first_site, switch)
    return sites + _install_experts(model, found, first_site + len(sites), switch)


def _install_routers(
    model: PreTrainedModel, found: list[FoundExperts], first_site: int, switch: LoraSwitch
) -> list[Site]:
    sites: list[Site] = []
    for each in found:
        block, shape = model.get_submodule(each.path), each.shape
        router = block.gate
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.in_features, linear.out_features = shape.hidden, shape.experts
        linear.weight = router.weight
        site = Site(first_site + len(sites), shape.hidden, (Slot(each.router, 0, shape.experts),))
        block.gate = LoraRouter(LoraLinear(linear, site, switch), router.top_k, normalizes=bool(router.norm_topk_prob))
        sites.append(site)
    return sites


def _install_experts(
    model: PreTrainedModel, found: list[FoundExperts], first_site: int, switch: LoraSwitch
) -> list[Site]:
    sites: list[Site] = []
    for each in found:
        block, shape = model.get_submodule(each.path), each.shape
        experts, index = block.experts, first_site + len(sites)
        own = (_gate_up_site(index, each.stack, shape), _down_site(index + 1, each.stack, shape))
        block.experts = LoraExperts(experts.gate_up_proj, experts.down_proj, experts.act_fn, own, switch)
        sites += own
    return sites


def _gate_up_site(index: int, stack: str, shape: ExpertShape) -> Site:
    names, width = ("gate_proj", "up_proj"), shape.width
    slots = [
        Slot(f"{stack}.{expert}.{name}", (2 * expert + i) * width, (2 * expert + i + 1) * width)
        for expert in range(shape.experts)
        for i, name in enumerate(names)
    ]
    return Site(index, shape.hidden, tuple(slots), experts=shape.experts)


def _down_site(index: int, stack: str, shape: ExpertShape) -> Site:
    hidden = shape.hidden
    slots = [
        Slot(f"{stack}.{expert}.down_proj", expert * hidden, (expert + 1) * hidden) for expert in range(shape.experts)
    ]
    return Site(index, shape.width, tuple(slots), experts=shape.experts)


def taken_over(model: PreTrainedModel, found: list[FoundExperts]) -> list[FoundExperts]:
    """Those that ours compute as transformers does: of each kind of block one is tried."""
    by_kind: dict[type[nn.Module], bool] = {}
    for each in found:
        block = model.get_submodule(each.path)
        kind = type(block)
        if kind not in by_kind:
            by_kind[kind] = _computes_alike(block, each)
            if not by_kind[kind]:
                _LOG.warning("%s is no softmax of experts as we know it: it runs as transformers wrote it", each.path)
    return [each for each in found if by_kind[type(model.get_submodule(each.path))]]


def _computes_alike(block: nn.Module, found: FoundExperts) -> bool:
    experts, router = block.experts, block.gate
    weight = router.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _CHECKED_ROWS, found.shape.hidden, generator=generator).to(weight.device, weight.dtype)
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = weight
    switch = LoraSwitch()
    own = (_gate_up_site(0, "", found.shape), _down_site(1, "", found.shape))
    ours = LoraExperts(experts.gate_up_proj, experts.down_proj, experts.act_fn, own, switch)
    with torch.inference_mode():
        expected = _result(block(x))
        block.experts, block.gate = (
            ours,
            LoraRouter(
                LoraLinear(linear, Site(0, found.shape.hidden, ()), switch),
                router.top_k,
                normalizes=bool(router.norm_topk_prob),
            ),
        )
        try:
            got = _result(block(x))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        finally:
            block.experts, block.gate = experts, router
    tolerance = 1e-4 if weight.dtype is torch.float32 else 0.05
    return bool((got - expected).norm() <= tolerance * expected.norm())


def _result(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).float()


def expert_linear(model: PreTrainedModel, path: str, stacks: Mapping[str, ExpertShape]) -> nn.Linear | None:
    """An expert's layer by its path, over its part of a stack; None: the path is of no expert."""
    parent, _, leaf = path.rpartition(".")
    stack, _, expert = parent.rpartition(".")
    shape = stacks.get(stack)
    if shape is None or not expert.isdecimal() or int(expert) >= shape.experts:
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
                weight.copy_(weight.float() + scale * (b.float() @ a.float()))
