"""TenantPolicy: what an operator grants to one tenant, and the grammar of the YAML document that says so
(docs/POLICY.md).

A bad document is refused with every error that it has, each at its line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import yaml

from manylora_shared.adapter_reference import ReferenceProblem, format_reference, parse_reference
from manylora_shared.errors import MAX_SHOWN, FieldViolation, InvalidRequest, shown
from manylora_shared.ids import (
    DEFAULT_POOL,
    AdapterDigest,
    AdapterName,
    AdapterUid,
    QosClass,
    TenantId,
    adapter_uid,
    name_problem,
)
from manylora_shared.policy_text import MAX_SCRUB_NAMES, SCRUB_NAME_RULE, given, is_scrub_name, scalar
from manylora_shared.tenancy.adapter_gate import GateReader, GateRule
from manylora_shared.tenancy.degrade import NO_DEGRADE, Degrade, DegradeReader

DEFAULT_WEIGHTS: Mapping[QosClass, int] = {QosClass.INTERACTIVE: 4, QosClass.STANDARD: 2, QosClass.BATCH: 1}
MAX_WEIGHT = 1000
MAX_LIMIT_TOKENS = 1 << 30
MAX_RATE = 1_000_000_000
MAX_KV_MB = 1 << 30
MAX_PINS = 256
MAX_COMPOSITIONS = 64
MAX_DEDICATED = 8
MAX_DEDICATED_WORKERS = 64
MAX_POOLS = 16
MAX_TTFT_MS = 3_600_000
MIN_AVAILABILITY = 0.5
MAX_SPEND = 1_000_000_000
MAX_RETENTION_DAYS = 36_500
MAX_DOCUMENT_BYTES = 16 * 1024
_MAX_DEPTH = 8  # more than the grammar has
_KEPT_POLICIES = 256
_MAX_VIOLATIONS = 24  # they travel in a status

_Read = Callable[[str, yaml.Node], object]
V = TypeVar("V")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STR_TAG = "tag:yaml.org,2002:str"
_INT_TAG = "tag:yaml.org,2002:int"
_BOOL_TAG = "tag:yaml.org,2002:bool"
_SHARE = re.compile(r"0\.[0-9]{1,6}")
_PERCENTAGE = re.compile(r"([0-9]{2}(?:\.[0-9]{1,4})?)%")
_LIMITS = {"max_prompt_tokens": (1, MAX_LIMIT_TOKENS), "max_output_tokens": (1, MAX_LIMIT_TOKENS)}
_QUOTAS = {
    "requests_per_s": (1, MAX_RATE),
    "requests_burst": (1, MAX_RATE),
    "concurrency": (1, MAX_RATE),
    "max_queued": (1, MAX_RATE),
    "resumes_per_s": (1, MAX_RATE),
    "resumes_burst": (1, MAX_RATE),
    "monthly_spend": (1, MAX_SPEND),
    "kv_hbm_mb": (1, MAX_KV_MB),
    "kv_hbm_mb_hard": (1, MAX_KV_MB),
    "kv_hbm_mb_reserve": (1, MAX_KV_MB),
}
_ORDERED = (
    ("kv_hbm_mb_reserve", "kv_hbm_mb"),
    ("kv_hbm_mb", "kv_hbm_mb_hard"),
    ("kv_hbm_mb_reserve", "kv_hbm_mb_hard"),
)  # the second is never less than the first


@dataclass(frozen=True)
class TokenRate:
    rate_tps: int  # prompt and output tokens alike
    burst_tps: int  # tokens that may be used at once after a pause


@dataclass(frozen=True)
class Slo:
    """What routers measure and report. At least one is given."""

    ttft_p95_ms: int | None = None
    availability: float | None = None


Speculation = Literal["off", "prompt_lookup", "draft"]
_SPECULATIONS: Mapping[str, Speculation] = {"off": "off", "prompt_lookup": "prompt_lookup", "draft": "draft"}


@dataclass(frozen=True)
class ClassPolicy:
    weight: int  # 1..1000, relative to all other flows
    token_bucket: TokenRate | None = None
    slo: Slo | None = None
    speculation: Speculation = "off"  # how workers guess tokens


@dataclass(frozen=True)
class TenantLimits:
    """Bounds of one request; None leaves the model's."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None  # per choice


@dataclass(frozen=True)
class TenantQuotas:
    """Bounds over all routers; None is unbounded. KV quotas are in MiB on each worker."""

    requests_per_s: int | None = None
    requests_burst: int | None = None  # None: as many as requests_per_s
    concurrency: int | None = None
    max_queued: int | None = None  # requests that no worker runs yet
    # answers that other workers go on with when theirs is lost, on each router; None: that router's default
    resumes_per_s: int | None = None
    resumes_burst: int | None = None  # None: as many as resumes_per_s
    monthly_spend: int | None = None  # in the currency of the routers' price list
    kv_hbm_mb: int | None = None
    kv_hbm_mb_hard: int | None = None
    kv_hbm_mb_reserve: int | None = None


@dataclass(frozen=True)
class TenantSecurity:
    can_stream: bool = True  # False: an answer is handed out whole
    data_retention_days: int = 0  # for which prompts and answers are kept, sealed; 0: they are not
    scrub_names: tuple[str, ...] = ()  # what is taken out of kept texts, beside what the rules find


def _default_classes() -> dict[QosClass, ClassPolicy]:
    return {qos_class: ClassPolicy(weight) for qos_class, weight in DEFAULT_WEIGHTS.items()}


@dataclass(frozen=True)
class TenantPolicy:
    tenant_id: TenantId
    classes: Mapping[QosClass, ClassPolicy] = field(default_factory=_default_classes)
    limits: TenantLimits = TenantLimits()
    quotas: TenantQuotas = TenantQuotas()
    pinned_adapters: tuple[AdapterName, ...] = ()  # the first ones come first where not all have room
    security: TenantSecurity = TenantSecurity()
    cache_group: str | None = None  # tenants whose policies name the same group share what is cached
    share_copies: bool = False  # of adapters, with the other tenants whose policies say so
    adapter_gate: GateRule | None = None  # what a new version of an adapter must pass
    # names that stand for several adapters with weights, as `format_reference` writes them
    compositions: Mapping[AdapterName, str] = field(default_factory=dict)
    dedicated: Mapping[AdapterName, int] = field(default_factory=dict)  # workers that serve the adapter alone, merged
    degrade: Degrade = NO_DEGRADE
    pools: tuple[str, ...] = (DEFAULT_POOL,)  # that it may use; the first is where a request goes that names none

    def weight(self, qos_class: QosClass) -> int:
        return self.classes[qos_class].weight

    @property
    def tenant_weight(self) -> int:
        return sum(each.weight for each in self.classes.values())

    def classes_with(self, speculation: Speculation) -> frozenset[QosClass]:
        return frozenset(qos_class for qos_class, each in self.classes.items() if each.speculation == speculation)

    def copy_of(self, digest: AdapterDigest) -> AdapterUid:
        return adapter_uid(digest, None if self.share_copies else self.tenant_id)

    def to_yaml(self) -> str:
        """The canonical form: parse_policy gives an equal policy back."""
        lines = [f'tenant_id: "{self.tenant_id}"', "classes:"]
        for qos_class in QosClass:
            policy = self.classes[qos_class]
            lines += [f"  {qos_class.value}:", f"    weight: {policy.weight}"]
            if policy.token_bucket is not None:
                lines += ["    token_bucket:", *given(policy.token_bucket, "      ")]
            if policy.slo is not None:
                lines += ["    slo:", *given(policy.slo, "      ")]
            if policy.speculation != "off":
                lines.append(f"    speculation: {policy.speculation}")
        quotas = given(self.quotas, "  ") + given(self.limits, "  ")
        if quotas:
            lines += ["quotas:", *quotas]
        adapters = len(lines)
        if self.pinned_adapters:
            lines += ["  pin:", *(f'  - "{name}"' for name in self.pinned_adapters)]
        if self.share_copies:
            lines += ["  share_copies: true"]
        if self.adapter_gate is not None:
            lines += ["  gate:", *given(self.adapter_gate, "    ")]
        if self.compositions:
            lines += ["  compose:", *(f'    "{name}": "{parts}"' for name, parts in self.compositions.items())]
        if self.dedicated:
            lines += ["  dedicated:", *(f'    "{name}": {count}' for name, count in self.dedicated.items())]
        if len(lines) > adapters:
            lines.insert(adapters, "adapters:")
        if self.cache_group is not None:
            lines += ["prefix_cache:", f'  group: "{self.cache_group}"']
        if self.pools != (DEFAULT_POOL,):
            lines.append(f"pools: [{', '.join(scalar(pool) for pool in self.pools)}]")
        if self.degrade.steps:
            lines.append(f"degrade: {self.degrade.to_yaml()}")
        if self.security != TenantSecurity():
            lines += ["security:", *given(self.security, "  ")]
        return "\n".join(lines) + "\n"


@functools.lru_cache(maxsize=_KEPT_POLICIES)
def parse_policy(yaml_text: str) -> TenantPolicy:
    """Raises InvalidRequest with one violation for each error, which begins with `line N`."""
    root = _compose(yaml_text)
    reader = _Reader()
    policy = reader.policy(root)
    if violations := reader.violations:
        more = len(violations) - _MAX_VIOLATIONS
        shown = violations[:_MAX_VIOLATIONS]
        if more > 0:
            shown.append(FieldViolation("policy_yaml", f"has {more} more errors"))
        raise InvalidRequest.of_all(shown)
    assert policy is not None
    return policy


def line_of(yaml_text: str, path: str) -> int:
    """1 where the document has no such field."""
    node, line = _compose(yaml_text), 1
    for name in path.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        key, node = next(((key, value) for key, value in pairs if key.value == name), (None, None))
        if key is None:
            return 1
        line = _line(key)
    return line


def _compose(yaml_text: str) -> yaml.Node | None:
    # What could cost more than its bytes (aliases, depth, size) is refused before.
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


def _only(values: Sequence[V | None]) -> V | None:
    return values[0] if values else None


def _line(marked: Any) -> int:
    return int(marked.start_mark.line) + 1


class _Reader:
    """Collects the violations of one document. A value that is None had one."""

    def __init__(self) -> None:
        self._found: list[tuple[int, FieldViolation]] = []

    @property
    def violations(self) -> list[FieldViolation]:
        return [violation for _, violation in sorted(self._found, key=lambda found: found[0])]

    def policy(self, root: yaml.Node | None) -> TenantPolicy | None:
        if root is None:
            self._found.append((1, FieldViolation("policy_yaml", "line 1: is empty")))
            return None
        tenant_id: list[str | None] = []
        cache_group: list[str | None] = []
        classes = _default_classes()
        quotas: dict[str, tuple[int, yaml.Node]] = {}
        pins: list[AdapterName] = []
        share_copies: list[bool | None] = []
        gate = GateReader(self._add, self._name, self._integer, self._mapping)
        dedicated: dict[str, tuple[int, yaml.Node]] = {}
        compositions: dict[AdapterName, str] = {}
        security: dict[str, Any] = {}
        pools: list[str] = []
        degrade = DegradeReader(self._add, self._name)
        readers: dict[str, _Read] = {
            "tenant_id": lambda path, node: tenant_id.append(self._name(path, node)),
            "classes": lambda path, node: self._classes(path, node, classes),
            "quotas": lambda path, node: self._integers(path, node, {**_QUOTAS, **_LIMITS}, quotas),
            "adapters": lambda path, node: self._adapters(
                path, node, pins, share_copies, gate, compositions, dedicated
            ),
            "prefix_cache": lambda path, node: self._prefix_cache(path, node, cache_group),
            "security": lambda path, node: self._security(path, node, security),
            "degrade": degrade.read,
            "pools": lambda path, node: self._names(path, node, pools, "pools", MAX_POOLS, 1),
        }
        found = self._mapping("", root, readers)
        if found is not None and "tenant_id" not in found:
            self._add("tenant_id", root, "is missing")
        self._check_quotas(quotas)
        rule = degrade.rule(pools or [DEFAULT_POOL])
        if not tenant_id or tenant_id[0] is None:
            return None
        values = {name: value for name, (value, _) in quotas.items()}
        return TenantPolicy(
            tenant_id=TenantId(tenant_id[0]),
            classes=classes,
            limits=TenantLimits(**{name: value for name, value in values.items() if name in _LIMITS}),
            quotas=TenantQuotas(**{name: value for name, value in values.items() if name in _QUOTAS}),
            pinned_adapters=tuple(pins),
            share_copies=bool(_only(share_copies)),
            adapter_gate=gate.rule,
            compositions=compositions,
            dedicated={AdapterName(name): count for name, (count, _) in dedicated.items()},
            security=TenantSecurity(**security),
            cache_group=_only(cache_group),
            degrade=rule,
            pools=tuple(pools) or (DEFAULT_POOL,),
        )

    def _check_quotas(self, quotas: Mapping[str, tuple[int, yaml.Node]]) -> None:
        # A violation is told at the second field's line.
        for low, high in _ORDERED:
            if low in quotas and high in quotas and quotas[low][0] > quotas[high][0]:
                value, node = quotas[high]
                self._add(f"quotas.{high}", node, f"{value} is less than {low}, {quotas[low][0]}")
        for rate, burst in (("requests_per_s", "requests_burst"), ("resumes_per_s", "resumes_burst")):
            if burst in quotas and rate not in quotas:
                self._add(f"quotas.{burst}", quotas[burst][1], f"needs {rate} beside it")

    def _name(self, path: str, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._add(path, node, "must be a string")
        elif node.tag != _STR_TAG:
            self._add(path, node, f"must be a string; write {shown(node.value)} in quotes")
        elif problem := name_problem(node.value):
            self._add(path, node, f"{shown(node.value)} {problem}" if node.value else problem)
        else:
            return str(node.value)
        return None

    def _classes(self, path: str, node: yaml.Node, classes: dict[QosClass, ClassPolicy]) -> None:
        self._mapping(path, node, {c.value: self._class_reader(c, classes) for c in QosClass})

    def _class_reader(self, qos_class: QosClass, classes: dict[QosClass, ClassPolicy]) -> _Read:
        def read_class(path: str, node: yaml.Node) -> None:
            weights: list[int | None] = []
            buckets: list[TokenRate | None] = []
            slos: list[Slo | None] = []
            speculations: list[Speculation | None] = []
            readers: dict[str, _Read] = {
                "weight": lambda at, value: weights.append(self._integer(at, value, 1, MAX_WEIGHT)),
                "token_bucket": lambda at, value: buckets.append(self._token_bucket(at, value)),
                "slo": lambda at, value: slos.append(self._slo(at, value)),
                "speculation": lambda at, value: speculations.append(self._speculation(at, value)),
            }
            found = self._mapping(path, node, readers)
            if found is not None and "weight" not in found:
                self._add(f"{path}.weight", node, "is missing")
            if weights and weights[0] is not None:
                how: Speculation = _only(speculations) or "off"
                classes[qos_class] = ClassPolicy(weights[0], _only(buckets), _only(slos), how)

        return read_class

    def _speculation(self, path: str, node: yaml.Node) -> Speculation | None:
        if isinstance(node, yaml.ScalarNode) and node.value in _SPECULATIONS:
            return _SPECULATIONS[node.value]
        self._add(path, node, "must be prompt_lookup, draft or off")
        return None

    def _token_bucket(self, path: str, node: yaml.Node) -> TokenRate | None:
        values: dict[str, tuple[int, yaml.Node]] = {}
        found = self._integers(path, node, {"rate_tps": (1, MAX_RATE), "burst_tps": (1, MAX_RATE)}, values)
        for name in ("rate_tps", "burst_tps"):
            if found is not None and name not in found:
                self._add(f"{path}.{name}", node, "is missing")
        return TokenRate(values["rate_tps"][0], values["burst_tps"][0]) if len(values) == 2 else None

    def _slo(self, path: str, node: yaml.Node) -> Slo | None:
        ttft: list[int | None] = []
        availability: list[float | None] = []
        readers: dict[str, _Read] = {
            "ttft_p95_ms": lambda at, value: ttft.append(self._integer(at, value, 1, MAX_TTFT_MS)),
            "availability": lambda at, value: availability.append(self._share(at, value)),
        }
        if self._mapping(path, node, readers) == []:
            self._add(path, node, f"needs one of the keys {', '.join(readers)}")
        return Slo(_only(ttft), _only(availability)) if ttft or availability else None

    def _names(self, path: str, node: yaml.Node, names: list[str], what: str, most: int, least: int = 0) -> None:
        if not isinstance(node, yaml.SequenceNode):
            self._add(path, node, f"must be a list of {what}' names")
            return
        if not least <= len(node.value) <= most:
            bound = f"more than {most}" if node.value else "and at least one is needed"
            self._add(path, node, f"has {len(node.value)} names, {bound}")
            return
        for index, item in enumerate(node.value):
            if not isinstance(item, yaml.ScalarNode):
                self._add(f"{path}[{index}]", item, f"must be one of the {what}' names")
            elif problem := name_problem(item.value):
                self._add(f"{path}[{index}]", item, f"{shown(item.value)} {problem}" if item.value else problem)
            elif item.value in names:
                self._add(f"{path}[{index}]", item, f"{item.value} is given twice")
            else:
                names.append(item.value)

    def _adapters(
        self,
        path: str,
        node: yaml.Node,
        pins: list[AdapterName],
        share_copies: list[bool | None],
        gate: GateReader,
        compositions: dict[AdapterName, str],
        dedicated: dict[str, tuple[int, yaml.Node]],
    ) -> None:
        def read_pins(at: str, value: yaml.Node) -> None:
            names: list[str] = []
            self._names(at, value, names, "adapters", MAX_PINS)
            pins.extend(map(AdapterName, names))

        readers: dict[str, _Read] = {
            "pin": read_pins,
            "share_copies": lambda at, value: share_copies.append(self._bool(at, value)),
            "gate": gate.read,
            "compose": lambda at, value: self._compositions(at, value, compositions),
            "dedicated": lambda at, value: self._dedicated(at, value, dedicated),
        }
        self._mapping(path, node, readers)

    def _compositions(self, path: str, node: yaml.Node, compositions: dict[AdapterName, str]) -> None:
        if not isinstance(node, yaml.MappingNode):
            self._add(path, node, "must be a mapping of names to adapters, e.g. {formal_support: support+formal:0.5}")
            return
        if len(node.value) > MAX_COMPOSITIONS:
            self._add(path, node, f"has more than {MAX_COMPOSITIONS} names")
            return
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            at = f"{path}.{shown(name)}"
            if problem := name_problem(name):
                self._add(at, key, problem)
            elif name in compositions:
                self._add(at, key, "is given twice")
            elif not isinstance(value, yaml.ScalarNode):
                self._add(at, value, "must be adapters with weights in one text")
            else:
                try:
                    parts = parse_reference(value.value)
                except ReferenceProblem as refused:
                    self._add(at, value, str(refused))
                    continue
                if any(part.name == name for part in parts):
                    self._add(at, value, "names itself")
                compositions[AdapterName(name)] = format_reference(parts)

    def _dedicated(self, path: str, node: yaml.Node, counts: dict[str, tuple[int, yaml.Node]]) -> None:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = [key.value if isinstance(key, yaml.ScalarNode) else "" for key, _ in pairs]
        if not names:
            self._add(path, node, "must be a mapping of adapters to numbers of workers, e.g. {support: 1}")
        elif problem := next((f"{shown(name)} {name_problem(name)}" for name in names if name_problem(name)), None):
            self._add(path, node, problem)
        elif len(names) > MAX_DEDICATED:
            self._add(path, node, f"has more than {MAX_DEDICATED} names")
        else:
            self._integers(path, node, dict.fromkeys(names, (1, MAX_DEDICATED_WORKERS)), counts)

    def _prefix_cache(self, path: str, node: yaml.Node, group: list[str | None]) -> None:
        found = self._mapping(path, node, {"group": lambda at, value: group.append(self._name(at, value))})
        if found == []:
            self._add(path, node, "needs the key group")

    def _scrub_names(self, path: str, node: yaml.Node) -> tuple[str, ...]:
        items = node.value if isinstance(node, yaml.SequenceNode) else None
        if items is None or len(items) > MAX_SCRUB_NAMES:
            self._add(path, node, f"must be a list of {MAX_SCRUB_NAMES} texts at most")
        for index, item in enumerate(items or ()):
            if not isinstance(item, yaml.ScalarNode) or not is_scrub_name(item.value):
                self._add(f"{path}[{index}]", item, SCRUB_NAME_RULE)
        return tuple(str(item.value) for item in items or ())

    def _security(self, path: str, node: yaml.Node, security: dict[str, Any]) -> None:
        def read_can_stream(at: str, value: yaml.Node) -> None:
            if (can_stream := self._bool(at, value)) is not None:
                security["can_stream"] = can_stream

        def read_retention(at: str, value: yaml.Node) -> None:
            days = self._integer(at, value, 0, MAX_RETENTION_DAYS)
            if days is not None:
                security["data_retention_days"] = days

        readers: dict[str, _Read] = {"can_stream": read_can_stream, "data_retention_days": read_retention}
        readers["scrub_names"] = lambda at, value: security.update(scrub_names=self._scrub_names(at, value))
        self._mapping(path, node, readers)

    def _integers(
        self,
        path: str,
        node: yaml.Node,
        ranges: Mapping[str, tuple[int, int]],
        values: dict[str, tuple[int, yaml.Node]],
    ) -> list[str] | None:
        """Puts whole numbers into `values`. Returns as `_mapping`."""

        def reader(name: str, low: int, high: int) -> _Read:
            def read(at: str, value_node: yaml.Node) -> None:
                value = self._integer(at, value_node, low, high)
                if value is not None:
                    values[name] = (value, value_node)

            return read

        return self._mapping(path, node, {name: reader(name, *bounds) for name, bounds in ranges.items()})

    def _mapping(self, path: str, node: yaml.Node, readers: Mapping[str, _Read]) -> list[str] | None:
        """The keys found; None where the node is no mapping."""
        if not isinstance(node, yaml.MappingNode):
            self._add(path or "policy_yaml", node, f"must be a mapping with the keys {', '.join(readers)}")
            return None
        found: list[str] = []
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            key_path = f"{path}.{key[:MAX_SHOWN]}" if path else key[:MAX_SHOWN]
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

    def _bool(self, path: str, node: yaml.Node) -> bool | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _BOOL_TAG and node.value in ("true", "false"):
            return bool(node.value == "true")
        self._add(path, node, "must be true or false")
        return None

    def _share(self, path: str, node: yaml.Node) -> float | None:
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        percentage = _PERCENTAGE.fullmatch(text)
        if percentage or _SHARE.fullmatch(text):
            share = round(float(percentage[1]) / 100, 6) if percentage else float(text)
            if MIN_AVAILABILITY <= share < 1:
                return share
        self._add(path, node, f'must be a share from {MIN_AVAILABILITY} to below 1, e.g. 0.999 or "99.9%"')
        return None

    def _integer(self, path: str, node: yaml.Node, low: int, high: int) -> int | None:
        # Plain decimal digits only: YAML's octal, hexadecimal and sexagesimal integers would surprise their reader.
        if isinstance(node, yaml.ScalarNode) and node.tag == _INT_TAG:
            text = node.value
            if text.isascii() and text.isdigit() and len(text) <= 12 and not (len(text) > 1 and text[0] == "0"):
                value = int(text)
                if low <= value <= high:
                    return value
            self._add(path, node, f"must be a whole number from {low} to {high}, not {shown(text)}")
        else:
            self._add(path, node, f"must be a whole number from {low} to {high}")
        return None

    def _add(self, path: str, node: yaml.Node, description: str) -> None:
        self._found.append((_line(node), FieldViolation(path, f"line {_line(node)}: {description}")))
