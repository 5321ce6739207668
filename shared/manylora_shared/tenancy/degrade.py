"""What a tenant's policy lets overload take from answers before it refuses requests. Pure; owns nothing.

The steps come one after the other, as the policy lists them, a rung of sixteen levels apart: the first from the level
where overload begins to give anything up. They act on what is above the tenant's share alone, as all levels do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

import yaml

from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import LEVELS, MAX_OUTPUT_TOKENS, MIN_OUTPUT_TOKENS, OverloadView

FIRST_LEVEL = 17
LEVELS_APART = 16


class Step(enum.StrEnum):
    SHORTER_OUTPUTS = "shorter_outputs"
    SMALLER_POOL = "smaller_pool"
    NO_STREAM = "no_stream"


@dataclass(frozen=True)
class Degrade:
    steps: tuple[Step, ...] = ()
    pool: str = ""  # of SMALLER_POOL

    def to_yaml(self) -> str:
        told = (f'{{{s}: "{self.pool}"}}' if s is Step.SMALLER_POOL else s for s in self.steps)
        return f"[{', '.join(told)}]"


NO_DEGRADE = Degrade()


@dataclass(frozen=True)
class Taken:
    """From one request."""

    level: int = 0
    steps: Collection[Step] = ()

    @property
    def max_tokens(self) -> int | None:
        """Of a choice; None: as many as were asked for."""
        if Step.SHORTER_OUTPUTS not in self.steps:
            return None
        left = (LEVELS - min(self.level, LEVELS)) / (LEVELS - FIRST_LEVEL)
        return int(MIN_OUTPUT_TOKENS * (MAX_OUTPUT_TOKENS / MIN_OUTPUT_TOKENS) ** left)


NOTHING = Taken()


def taken(rule: Degrade, view: OverloadView, tenant_id: TenantId, qos_class: QosClass, request_id: str) -> Taken:
    if view.is_quiet or not rule.steps:
        return NOTHING
    level = view.level_of(tenant_id, qos_class)
    if level < FIRST_LEVEL:
        return NOTHING
    if tenant_id in view.tenants and view.height_of(tenant_id, qos_class, request_id) < 1.0:
        return NOTHING  # each keeps as much as one share
    count = 1 + (level - FIRST_LEVEL) // LEVELS_APART
    return Taken(level, rule.steps[:count])


class DegradeReader:
    """Of a policy's document. add: takes a violation. name: of a node; None: it is none, which was added."""

    def __init__(
        self, add: Callable[[str, yaml.Node, str], None], name: Callable[[str, yaml.Node], str | None]
    ) -> None:
        self._add = add
        self._name = name
        self._steps: dict[Step, tuple[str, yaml.Node]] = {}

    def read(self, path: str, node: yaml.Node) -> None:
        if not isinstance(node, yaml.SequenceNode):
            self._add(path, node, f"must be a list of {', '.join(Step)}")
            return
        for index, item in enumerate(node.value):
            found = self._step(f"{path}[{index}]", item)
            if found is not None and found[0] in self._steps:
                self._add(f"{path}[{index}]", item, f"{found[0]} is given twice")
            elif found is not None:
                self._steps[found[0]] = (found[1], item)

    def rule(self, pools: Collection[str]) -> Degrade:
        """pools: of the policy."""
        name, node = self._steps.get(Step.SMALLER_POOL, ("", None))
        if node is not None and name not in pools:
            self._add("degrade", node, f"{name} is none of this policy's pools")
        return Degrade(tuple(self._steps), name)

    def _step(self, path: str, item: yaml.Node) -> tuple[Step, str] | None:
        if isinstance(item, yaml.ScalarNode) and item.value in (Step.SHORTER_OUTPUTS, Step.NO_STREAM):
            return Step(item.value), ""
        if isinstance(item, yaml.MappingNode) and len(item.value) == 1 and item.value[0][0].value == Step.SMALLER_POOL:
            pool = self._name(f"{path}.{Step.SMALLER_POOL}", item.value[0][1])
            return (Step.SMALLER_POOL, pool) if pool is not None else None
        self._add(path, item, "must be shorter_outputs, no_stream, or {smaller_pool: NAME}")
        return None
