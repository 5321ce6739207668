from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from manylora.load.planning.arrivals import Closed, Diurnal, Gamma, OnOff, Poisson, Trace, TraceRow
from manylora.load.planning.fields import BadMix
from manylora.load.planning.mix import Slo, mix_of
from manylora.load.planning.sizes import Length

ROWS = (TraceRow(0.0, 10, 3),)
WHOLE: dict[str, Any] = {
    "url": "http://x:1",
    "duration_s": 60,
    "warmup_s": 5,
    "seed": 7,
    "model": "base",
    "api": "chat",
    "ignore_eos": False,
    "body": {"temperature": 0},
    "slo": {"ttft_ms": 500},
    "arrivals": {"rate": 10},
    "tenants": {
        "acme": {
            "key": "env:ACME",
            "class": "interactive",
            "share": 3,
            "weight": 4,
            "adapters": ["a", "b"],
            "zipf": 1.2,
            "base_part": 0.1,
            "prompt_tokens": "64-512",
            "output_tokens": 32,
            "prefix_tokens": 40,
        },
        "team-{n}": {"count": 3, "tenant_zipf": 1, "tenant_id": "t{n}", "adapters": {"pattern": "l{n}", "count": 2}},
        "own": {"arrivals": {"kind": "closed", "streams": 4, "think_s": 1}, "slo": {"tpot_ms": 30}},
    },
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(WHOLE), **fields}


def with_tenant(**fields: Any) -> dict[str, Any]:
    return changed(tenants={"a": fields})


def test_all_fields_of_a_mix() -> None:
    mix = mix_of(WHOLE, lambda name: ROWS)
    acme, *teams, own = mix.tenants
    assert (mix.duration_s, mix.warmup_s, mix.seed, mix.api, mix.ignore_eos) == (60, 5, 7, "chat", False)
    assert mix.arrivals == Poisson(10)
    assert (acme.key, acme.qos_class, acme.weight, acme.adapters) == ("env:ACME", "interactive", 4, ("a", "b"))
    assert (acme.prompt, acme.output, acme.prefix_tokens) == (Length(64, 512), Length(32, 32), 40)
    assert acme.slo == Slo(ttft_ms=500)
    assert own.slo == Slo(tpot_ms=30)
    assert own.arrivals == Closed(4, 1)
    assert [team.name for team in teams] == ["team-0", "team-1", "team-2"]
    assert [team.tenant_id for team in teams] == ["t0", "t1", "t2"]
    assert sum(team.share for team in teams) == pytest.approx(1)
    assert teams[0].share == pytest.approx(3 * teams[2].share)
    assert teams[0].adapters == ("l0", "l1")
    assert {tenant.model for tenant in mix.tenants} == {"base"}


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ({"kind": "gamma", "rate": 3, "cv": 4}, Gamma(3, 4)),
        ({"kind": "on-off", "rate": 3, "on_s": 1, "off_s": 2}, OnOff(3, 1, 2)),
        ({"kind": "diurnal", "rate": 3, "period_s": 9}, Diurnal(3, 9, 0.8)),
        ({"kind": "trace", "file": "f", "speed": 2}, Trace(ROWS, 2.0)),
    ],
)
def test_kinds_of_arrivals(arrivals: dict[str, Any], expected: object) -> None:
    assert mix_of(with_tenant() | {"arrivals": arrivals}, lambda name: ROWS).arrivals == expected


def test_a_trace_brings_its_lengths_unless_the_tenant_has_its_own() -> None:
    traced = {"arrivals": {"kind": "trace", "file": "f"}}
    assert mix_of(with_tenant() | traced, lambda name: ROWS).tenants[0].traced_lengths
    own = with_tenant(prompt_tokens=5, output_tokens=6) | traced
    assert not mix_of(own, lambda name: ROWS).tenants[0].traced_lengths
    with pytest.raises(BadMix, match="give both"):
        mix_of(with_tenant(prompt_tokens=5) | traced, lambda name: ROWS)


def refuse(name: str) -> tuple[TraceRow, ...]:
    raise BadMix(f"{name}: cannot be read")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the mix: must be a mapping"),
        (changed(tenant={}), "tenant: there is no such field"),
        (changed(tenants={}), "tenants: at least one"),
        (changed(api="responses"), "api: 'responses' is none of"),
        (changed(prompts="ids"), "prompts: a chat has no token ids"),
        (changed(duration_s=None), "duration_s: is missing"),
        (changed(warmup_s=60), "warmup_s: nothing"),
        (changed(seed=1.5), "seed: must be a whole number"),
        (changed(body=[]), "body: must be a mapping"),
        (changed(slo={"ttft": 3}), "slo.ttft: there is no such field"),
        (changed(arrivals={"rate": 0}), "arrivals.rate: must be above 0"),
        (changed(arrivals={"rate": float("nan")}), "arrivals.rate: must be a number"),
        (changed(arrivals={"kind": "uniform"}), "arrivals.kind: 'uniform' is none of"),
        (changed(arrivals={"kind": "closed", "streams": 0}), "arrivals.streams: must be at least 1"),
        (changed(arrivals={"kind": "diurnal", "rate": 1, "swing": 2}), "arrivals.swing: must be at most 1"),
        (changed(arrivals={"kind": "trace", "file": "f"}), "arrivals.file: f: cannot be read"),
        (changed(arrivals={"kind": "trace"}), "arrivals.file: is missing"),
        (with_tenant(arrivals={"rate": 1}), "arrivals: every tenant has its own"),
        (with_tenant(key="mlk-secret"), "tenants.a.key: must be env:NAME or file:PATH"),
        (with_tenant(adapters="a"), "tenants.a.adapters: must be a list"),
        (with_tenant(adapters={"pattern": "x", "count": 2}), "tenants.a.adapters.pattern: needs {n}"),
        (with_tenant(count=2), "tenants.a: its name needs {n}"),
        (with_tenant(share=0), "tenants.a.share: must be above 0"),
        (with_tenant(base_part=2), "tenants.a.base_part: must be at most 1"),
        (with_tenant(rate=2), "tenants.a.rate: there is no such field"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(document: object, message: str) -> None:
    if isinstance(document, dict) and document.get("duration_s", 1) is None:
        del document["duration_s"]
    with pytest.raises(BadMix) as caught:
        mix_of(document, refuse)
    assert str(caught.value).startswith(message)
    assert "mlk-secret" not in str(caught.value)


def test_without_arrivals_nothing_would_come() -> None:
    document = with_tenant()
    del document["arrivals"]
    with pytest.raises(BadMix, match=r"^tenants\.a\.arrivals: is missing"):
        mix_of(document, refuse)


def test_the_documented_mix_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs/OPERATIONS.md").read_text()
    (block,) = re.findall(r"```yaml\n(url: .*?)```", text, flags=re.DOTALL)
    mix = mix_of(yaml.safe_load(block), refuse)
    assert len(mix.tenants) == 52
