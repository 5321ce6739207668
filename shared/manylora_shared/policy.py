"""TenantPolicy: what an operator grants to one tenant, and the YAML document that says so.

Owns the document's grammar. A document is read whole before anything of it counts, and a bad one is refused with every
error that it has (the first 24 of them: they travel in a status), each at its line. `to_yaml` is the canonical form:
equal policies have equal text, and it is what the coordination store keeps.

    tenant_id: "acme"
    classes:                     # optional; a class that is absent has its default weight
      interactive: {weight: 8}
      batch: {weight: 1}
    limits:                      # optional; an absent limit leaves only the model's own
      max_prompt_tokens: 2048
      max_output_tokens: 512
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import QosClass, TenantId, is_valid_name

DEFAULT_WEIGHTS: Mapping[QosClass, int] = {QosClass.INTERACTIVE: 4, QosClass.STANDARD: 2, QosClass.BATCH: 1}
MAX_WEIGHT = 1000
MAX_LIMIT_TOKENS = 1 << 30
MAX_DOCUMENT_BYTES = 16 * 1024
_MAX_DEPTH = 8
"""Deeper nesting than the grammar has, and far less than would exhaust the stack."""
_MAX_VIOLATIONS = 24
_MAX_SHOWN = 80
"""Characters of a wrong value that an error repeats."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STR_TAG = "tag:yaml.org,2002:str"
_INT_TAG = "tag:yaml.org,2002:int"


@dataclass(frozen=True)
class ClassPolicy:
    weight: int
    """1..1000: the flow's share of contended service, relative to all other flows."""


@dataclass(frozen=True)
class TenantLimits:
    """Bounds on one request, besides the model's own; None leaves the model's."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    """Per choice."""


def _default_classes() -> dict[QosClass, ClassPolicy]:
    return {qos_class: ClassPolicy(weight) for qos_class, weight in DEFAULT_WEIGHTS.items()}


@dataclass(frozen=True)
class TenantPolicy:
    tenant_id: TenantId
    classes: Mapping[QosClass, ClassPolicy] = field(default_factory=_default_classes)
    """Always all classes, in the order of QosClass."""
    limits: TenantLimits = TenantLimits()

    def weight(self, qos_class: QosClass) -> int:
        return self.classes[qos_class].weight

    def to_yaml(self) -> str:
        """The canonical document; parse_policy gives an equal policy back."""
        lines = [f'tenant_id: "{self.tenant_id}"', "classes:"]
        for qos_class in QosClass:
            lines += [f"  {qos_class.value}:", f"    weight: {self.classes[qos_class].weight}"]
        limits = [
            (name, value)
            for name, value in (
                ("max_prompt_tokens", self.limits.max_prompt_tokens),
                ("max_output_tokens", self.limits.max_output_tokens),
            )
            if value is not None
        ]
        if limits:
            lines.append("limits:")
            lines += [f"  {name}: {value}" for name, value in limits]
        return "\n".join(lines) + "\n"


def parse_policy(yaml_text: str) -> TenantPolicy:
    """Reads one policy document.

    Raises:
        InvalidRequest: with one violation for each error; its description begins with `line N`.
    """
    root = _compose(yaml_text)
    reader = _Reader()
    policy = reader.policy(root)
    if reader.violations:
        more = len(reader.violations) - _MAX_VIOLATIONS
        shown = reader.violations[:_MAX_VIOLATIONS]
        if more > 0:
            shown.append(FieldViolation("policy_yaml", f"has {more} more errors"))
        raise InvalidRequest.of_all(shown)
    assert policy is not None
    return policy


def _compose(yaml_text: str) -> yaml.Node | None:
    """The document as nodes; what could cost more than its bytes (aliases, depth, size) is refused before."""
    try:
        size_bytes = len(yaml_text.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequest.of("policy_yaml", "is not valid Unicode") from e
    if size_bytes > MAX_DOCUMENT_BYTES:
        raise InvalidRequest.of("policy_yaml", f"has {size_bytes} bytes, more than {MAX_DOCUMENT_BYTES}")
    depth = 0
    try:
        for event in yaml.parse(yaml_text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise InvalidRequest.of("policy_yaml", f"line {_line(event)}: anchors and aliases are not allowed")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > _MAX_DEPTH:
                    raise InvalidRequest.of(
                        "policy_yaml", f"line {_line(event)}: is nested deeper than {_MAX_DEPTH} levels"
                    )
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
                raise InvalidRequest.of("policy_yaml", f"line {_line(event)}: tags are not allowed")
        return yaml.compose(yaml_text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise InvalidRequest.of("policy_yaml", f"{place}is not YAML: {e.problem or e.context}") from e
    except yaml.YAMLError as e:
        raise InvalidRequest.of("policy_yaml", f"is not YAML: {' '.join(str(e).split())}") from e


def _line(marked: Any) -> int:
    return int(marked.start_mark.line) + 1


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


class _Reader:
    """Walks the nodes of one document and collects its violations. A value that is None had one."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def policy(self, root: yaml.Node | None) -> TenantPolicy | None:
        if root is None:
            self.violations.append(FieldViolation("policy_yaml", "line 1: is empty"))
            return None
        tenant_id: TenantId | None = None
        classes = _default_classes()
        limits = TenantLimits()

        def read_tenant(path: str, node: yaml.Node) -> None:
            nonlocal tenant_id
            tenant_id = self._tenant_id(path, node)

        def read_classes(path: str, node: yaml.Node) -> None:
            self._mapping(path, node, {c.value: self._class_reader(c, classes) for c in QosClass})

        def read_limits(path: str, node: yaml.Node) -> None:
            nonlocal limits
            limits = self._limits(path, node)

        readers = {"tenant_id": read_tenant, "classes": read_classes, "limits": read_limits}
        found = self._mapping("", root, readers)
        if found is not None and "tenant_id" not in found:
            self._add("tenant_id", root, "is missing")
        return TenantPolicy(tenant_id, classes, limits) if tenant_id is not None else None

    def _tenant_id(self, path: str, node: yaml.Node) -> TenantId | None:
        if not isinstance(node, yaml.ScalarNode):
            self._add(path, node, "must be a string")
        elif node.tag != _STR_TAG:
            self._add(path, node, f"must be a string; write {_shown(node.value)} in quotes")
        elif not is_valid_name(node.value):
            self._add(
                path,
                node,
                f"{_shown(node.value)} is not a name: 1 to 64 of a-z 0-9 . _ -, "
                "beginning with a letter or digit, without '..'",
            )
        else:
            return TenantId(node.value)
        return None

    def _class_reader(
        self, qos_class: QosClass, classes: dict[QosClass, ClassPolicy]
    ) -> Callable[[str, yaml.Node], None]:
        def read_weight(path: str, node: yaml.Node) -> None:
            weight = self._integer(path, node, 1, MAX_WEIGHT)
            if weight is not None:
                classes[qos_class] = ClassPolicy(weight)

        def read_class(path: str, node: yaml.Node) -> None:
            found = self._mapping(path, node, {"weight": read_weight})
            if found is not None and "weight" not in found:
                self._add(f"{path}.weight", node, "is missing")

        return read_class

    def _limits(self, path: str, node: yaml.Node) -> TenantLimits:
        values: dict[str, int] = {}

        def read_limit(limit_path: str, limit_node: yaml.Node) -> None:
            value = self._integer(limit_path, limit_node, 1, MAX_LIMIT_TOKENS)
            if value is not None:
                values[limit_path.rpartition(".")[2]] = value

        self._mapping(path, node, {"max_prompt_tokens": read_limit, "max_output_tokens": read_limit})
        return TenantLimits(values.get("max_prompt_tokens"), values.get("max_output_tokens"))

    def _mapping(
        self, path: str, node: yaml.Node, readers: Mapping[str, Callable[[str, yaml.Node], None]]
    ) -> list[str] | None:
        """Reads every known key of a mapping. Returns the keys found; None where the node is no mapping."""
        if not isinstance(node, yaml.MappingNode):
            self._add(path or "policy_yaml", node, f"must be a mapping with the keys {', '.join(readers)}")
            return None
        found: list[str] = []
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            key_path = f"{path}.{key[:_MAX_SHOWN]}" if path else key[:_MAX_SHOWN]
            if not isinstance(key_node, yaml.ScalarNode):
                self._add(path or "policy_yaml", key_node, "has a key that is not a word")
            elif key not in readers:
                self._add(key_path, key_node, f"is not known; the keys here are {', '.join(readers)}")
            elif key in found:
                self._add(key_path, key_node, "is given twice")
            else:
                found.append(key)
                readers[key](key_path, value_node)
        return found

    def _integer(self, path: str, node: yaml.Node, low: int, high: int) -> int | None:
        # Plain decimal digits only: YAML's octal, hexadecimal and sexagesimal integers would surprise their reader.
        if isinstance(node, yaml.ScalarNode) and node.tag == _INT_TAG:
            text = node.value
            if text.isascii() and text.isdigit() and len(text) <= 12 and not (len(text) > 1 and text[0] == "0"):
                value = int(text)
                if low <= value <= high:
                    return value
            self._add(path, node, f"must be a whole number from {low} to {high}, not {_shown(text)}")
        else:
            self._add(path, node, f"must be a whole number from {low} to {high}")
        return None

    def _add(self, path: str, node: yaml.Node, description: str) -> None:
        self.violations.append(FieldViolation(path, f"line {_line(node)}: {description}"))
