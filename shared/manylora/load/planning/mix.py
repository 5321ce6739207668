"""A mix of tenants, from a YAML document or the flags of one. Everything is checked before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manylora.load.planning.arrivals import (
    Arrivals,
    Closed,
    Constant,
    Diurnal,
    Gamma,
    OnOff,
    Poisson,
    Trace,
    TraceRow,
)
from manylora.load.planning.fields import BadMix, Fields
from manylora.load.planning.sizes import MAX_TOKENS, MOST_CV, Length, length_of, zipf_weights

KINDS = ("poisson", "constant", "gamma", "on-off", "diurnal", "trace", "closed")
APIS = ("completions", "chat")
PROMPTS = ("text", "ids")
_MAX_COPIES = 100_000
# Numbers within these neither overflow nor vanish in what is drawn by them.
_SECONDS = {"at_least": 0.001, "at_most": 1e9}
_RATE = {"at_least": 1e-9, "at_most": 1e6}
_CV = {"at_least": 0.01, "at_most": MOST_CV}
_FACTOR = {"at_least": 0.001, "at_most": 1e6}
_SHARE = {"at_least": 1e-9, "at_most": 1e9}
_MAX_REQUESTS = 10**9
_MAX_RANK = 512
_MAX_MS = 1e12

ReadTrace = Callable[[str], tuple[TraceRow, ...]]  # raises BadMix


@dataclass(frozen=True)
class Slo:
    """None: nothing is asked."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True)
class Tenant:
    """share: of the requests of a process that several have. weight: what it is entitled to of a busy server's tokens.
    adapters: from the most used one on. base_part: of its requests, to the base model where it has adapters.
    rank: of its adapters, for `manylora plan`; 0: not told.
    """

    name: str
    prompt: Length
    output: Length
    model: str = ""
    adapters: tuple[str, ...] = ()
    zipf: float = 1.0
    base_part: float = 0.0
    rank: int = 0
    key: str = ""  # env:NAME or file:PATH
    tenant_id: str = ""
    qos_class: str = ""
    share: float = 1.0
    weight: float = 1.0
    prefix_tokens: int = 0
    slo: Slo = Slo()
    arrivals: Arrivals | None = None
    traced_lengths: bool = False


@dataclass(frozen=True)
class Mix:
    tenants: tuple[Tenant, ...]
    arrivals: Arrivals | None  # of those that have none of their own
    url: str = ""
    duration_s: float | None = None
    requests: int | None = None
    warmup_s: float = 0.0
    seed: int = 1
    api: str = "completions"
    prompts: str = "text"
    ignore_eos: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request


def mix_of(document: object, read_trace: ReadTrace) -> Mix:
    """Raises BadMix."""
    fields = Fields(document)
    model, slo = fields.text("model"), _slo(fields)
    common = _arrivals(fields, read_trace)
    listed = Fields(fields.raw("tenants", {}), "tenants")
    names = listed.names()
    tenants = tuple(
        copy
        for name in names
        for copy in _tenants(name, Fields(listed.raw(name) or {}, f"tenants.{name}"), model, slo, common, read_trace)
    )
    if not tenants:
        raise BadMix("tenants: at least one is needed")
    mix = Mix(
        tenants=tenants,
        arrivals=common,
        url=fields.text("url"),
        duration_s=fields.number("duration_s", above=0, **_SECONDS) if "duration_s" in fields else None,
        requests=fields.count("requests", at_least=1, at_most=_MAX_REQUESTS) if "requests" in fields else None,
        warmup_s=fields.number("warmup_s", 0.0, at_least=0, at_most=_SECONDS["at_most"]),
        seed=fields.count("seed", 1),
        api=fields.one_of("api", APIS, "completions"),
        prompts=fields.one_of("prompts", PROMPTS, "text"),
        ignore_eos=fields.flag("ignore_eos", default=True),
        body=_body(fields),
    )
    fields.end()
    return _checked(mix)


def _checked(mix: Mix) -> Mix:
    if mix.api == "chat" and mix.prompts == "ids":
        raise BadMix("prompts: a chat has no token ids; use api: completions")
    without = [tenant.name for tenant in mix.tenants if tenant.arrivals is None]
    if without and mix.arrivals is None:
        raise BadMix(f"tenants.{without[0]}.arrivals: is missing, and the mix has none either")
    if not without and mix.arrivals is not None:
        raise BadMix("arrivals: every tenant has its own")
    processes = [each for each in (mix.arrivals, *(tenant.arrivals for tenant in mix.tenants)) if each is not None]
    endless = [each for each in processes if not isinstance(each, Trace)]
    if endless and mix.duration_s is None and mix.requests is None:
        raise BadMix("duration_s: is missing, as is requests; without either the run would not end")
    if mix.duration_s is not None and mix.warmup_s >= mix.duration_s:
        raise BadMix("warmup_s: nothing of the run would be counted")
    return mix


def _tenants(
    name: str, fields: Fields, model: str, slo: Slo, common: Arrivals | None, read_trace: ReadTrace
) -> Iterator[Tenant]:
    """One, or `count` of them, which share its share by `tenant_zipf`."""
    count, exponent = fields.count("count", 1, at_least=1), fields.number("tenant_zipf", 0.0, at_least=0)
    arrivals = _arrivals(fields, read_trace)
    source = arrivals if arrivals is not None else common
    is_traced = isinstance(source, Trace)
    sizes = [
        length_of(fields.raw(part, default), fields.at(part))
        for part, default in (("prompt_tokens", 128), ("output_tokens", 128))
        if part in fields or not is_traced
    ]
    if len(sizes) == 1:
        raise BadMix(f"{fields.path}: give both prompt_tokens and output_tokens, or neither and the trace's are used")
    prompt, output = sizes or (Length(1, 1), Length(1, 1))
    one = Tenant(
        name=name,
        prompt=prompt,
        output=output,
        model=fields.text("model", model),
        adapters=_adapters(fields),
        zipf=fields.number("zipf", 1.0, at_least=0),
        base_part=fields.number("base_part", 0.0, at_least=0, at_most=1),
        rank=fields.count("rank", 0, at_most=_MAX_RANK),
        key=_reference(fields),
        tenant_id=fields.text("tenant_id"),
        qos_class=fields.text("class"),
        share=fields.number("share", 1.0, above=0, **_SHARE),
        weight=fields.number("weight", 1.0, above=0, **_SHARE),
        prefix_tokens=fields.count("prefix_tokens", 0, at_most=MAX_TOKENS),
        slo=_slo(fields, slo),
        arrivals=arrivals,
        traced_lengths=not sizes,
    )
    fields.end()
    if count == 1:
        yield one
        return
    if count > _MAX_COPIES:
        raise BadMix(f"{fields.at('count')}: at most {_MAX_COPIES}")
    if "{n}" not in name:
        raise BadMix(f"{fields.path}: its name needs {{n}}, the number of each of the {count}")
    weights = zipf_weights(count, exponent)
    for number, weight in enumerate(weights):
        yield replace(
            one,
            name=name.replace("{n}", str(number)),
            tenant_id=one.tenant_id.replace("{n}", str(number)),
            key=one.key.replace("{n}", str(number)),
            share=one.share * weight / sum(weights),
        )


def _adapters(fields: Fields) -> tuple[str, ...]:
    """A list of names, or a mapping of `pattern` with {n} and `count`."""
    path, value = fields.at("adapters"), fields.raw("adapters", [])
    if isinstance(value, dict):
        inner = Fields(value, path)
        pattern, count = inner.text("pattern"), inner.count("count", at_least=1, at_most=_MAX_COPIES)
        inner.end()
        if "{n}" not in pattern:
            raise BadMix(f"{path}.pattern: needs {{n}}")
        return tuple(pattern.replace("{n}", str(number)) for number in range(count))
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise BadMix(f"{path}: must be a list of names, or a mapping of pattern and count")
    return tuple(value)


def _reference(fields: Fields) -> str:
    reference = fields.text("key")
    if reference and not reference.startswith(("env:", "file:")):
        raise BadMix(f"{fields.at('key')}: must be env:NAME or file:PATH; a key does not belong into a file like this")
    return reference


def _slo(fields: Fields, default: Slo | None = None) -> Slo:
    if "slo" not in fields:
        return default or Slo()
    inner = Fields(fields.raw("slo"), fields.at("slo"))
    targets = {
        name: inner.number(name, above=0, at_most=_MAX_MS) for name in ("ttft_ms", "tpot_ms", "e2e_ms") if name in inner
    }
    inner.end()
    return Slo(**targets)


def _body(fields: Fields) -> Mapping[str, Any]:
    value = fields.raw("body", {})
    if not isinstance(value, dict):
        raise BadMix(f"{fields.at('body')}: must be a mapping")
    return value


def _arrivals(fields: Fields, read_trace: ReadTrace) -> Arrivals | None:
    if "arrivals" not in fields:
        return None
    inner = Fields(fields.raw("arrivals"), fields.at("arrivals"))
    kind = inner.one_of("kind", KINDS, "poisson")
    found = _process(inner, kind, read_trace)
    inner.end()
    return found


def _process(fields: Fields, kind: str, read_trace: ReadTrace) -> Arrivals:
    match kind:
        case "trace":
            return Trace(
                _rows(fields, read_trace),
                fields.number("speed", 1.0, above=0, **_FACTOR),
                fields.number("length_scale", 1.0, above=0, **_FACTOR),
                fields.count("block_tokens", 512, at_least=1, at_most=MAX_TOKENS),
            )
        case "closed":
            return Closed(
                fields.count("streams", at_least=1, at_most=_MAX_COPIES),
                fields.number("think_s", 0.0, at_least=0, at_most=_SECONDS["at_most"]),
            )
    rate = fields.number("rate", above=0, **_RATE)
    match kind:
        case "constant":
            return Constant(rate)
        case "gamma":
            return Gamma(rate, fields.number("cv", 2.0, above=0, **_CV))
        case "on-off":
            return OnOff(
                rate,
                fields.number("on_s", 5.0, above=0, **_SECONDS),
                fields.number("off_s", 15.0, at_least=0, at_most=_SECONDS["at_most"]),
            )
        case "diurnal":
            swing = fields.number("swing", 0.8, at_least=0, at_most=1)
            return Diurnal(rate, fields.number("period_s", 600.0, above=0, **_SECONDS), swing)
    return Poisson(rate)


def _rows(fields: Fields, read_trace: ReadTrace) -> tuple[TraceRow, ...]:
    name = fields.text("file")
    if not name:
        raise BadMix(f"{fields.at('file')}: is missing")
    try:
        return read_trace(name)
    except BadMix as error:
        raise BadMix(f"{fields.at('file')}: {error}") from None
