"""The policy document: good ones come back equal, bad ones are refused with every error at its line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.adapter_reference import AdapterPart, format_reference
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterDigest, AdapterName, QosClass, TenantId
from manylora_shared.tenancy.adapter_gate import GateRule, Judge
from manylora_shared.tenancy.policy import (
    DEFAULT_WEIGHTS,
    MAX_DOCUMENT_BYTES,
    ClassPolicy,
    Slo,
    TenantLimits,
    TenantPolicy,
    TenantQuotas,
    TenantSecurity,
    TokenRate,
    line_of,
    parse_policy,
)

names = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z").filter(lambda name: ".." not in name)
tokens = st.none() | st.integers(1, 1 << 30)
rates = st.integers(1, 1_000_000_000)
shares = st.integers(500_000, 999_999).map(lambda millionths: millionths / 1_000_000)
slos = st.builds(Slo, st.integers(1, 3_600_000), st.none() | shares) | st.builds(Slo, st.none(), shares)
classes = st.builds(ClassPolicy, st.integers(1, 1000), st.none() | st.builds(TokenRate, rates, rates), st.none() | slos)


@st.composite
def quotas(draw: st.DrawFn) -> TenantQuotas:
    reserve, soft, hard = sorted(draw(st.lists(st.integers(1, 1 << 30), min_size=3, max_size=3)))
    kept = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    kv = [value if keep else None for value, keep in zip((soft, hard, reserve), kept, strict=True)]
    limits: list[int | None] = []
    for _ in ("requests", "resumes"):
        per_s = draw(st.none() | rates)
        limits += [per_s, draw(st.none() | rates) if per_s is not None else None]
    concurrency, queued, spend = [draw(st.none() | rates) for _ in range(3)]
    return TenantQuotas(*limits[:2], concurrency, queued, *limits[2:], spend, *kv)


parts = st.integers(0, 1_000_000).map(lambda millionths: millionths / 1_000_000)
gates = st.builds(
    GateRule,
    names,
    st.sampled_from([str(judge) for judge in Judge]),
    st.none() | parts,
    parts,
    st.none() | parts,
    st.integers(1, 1024),
    st.integers(1, 600),
)

compositions = st.dictionaries(names, st.sampled_from([1.0, 0.5, -2.0, 0.125]), min_size=1, max_size=4).map(
    lambda parts: format_reference(tuple(AdapterPart(AdapterName(name), None, parts[name]) for name in parts))
)

policies = st.builds(
    TenantPolicy,
    names.map(TenantId),
    st.fixed_dictionaries(dict.fromkeys(QosClass, classes)),
    st.builds(TenantLimits, tokens, tokens),
    quotas(),
    st.lists(names.map(AdapterName), max_size=4, unique=True).map(tuple),
    st.builds(TenantSecurity, st.booleans()),
    st.none() | names,
    st.booleans(),
    st.none() | gates,
    st.dictionaries(names.map(lambda name: AdapterName(f"c-{name}"[:40])), compositions, max_size=3),
)


@settings(deadline=None)
@given(policies)
def test_canonical_text_comes_back_equal(policy: TenantPolicy) -> None:
    again = parse_policy(policy.to_yaml())
    assert again == policy
    assert again.to_yaml() == policy.to_yaml()


def test_what_is_absent_has_its_default() -> None:
    policy = parse_policy("tenant_id: acme\nclasses: {batch: {weight: 7}}\n")
    assert {c: policy.weight(c) for c in QosClass} == {**DEFAULT_WEIGHTS, QosClass.BATCH: 7}
    assert policy.limits == TenantLimits()
    assert policy == parse_policy("# a comment\nclasses:\n  batch:\n    weight: 7\ntenant_id: 'acme'\n")


@pytest.mark.parametrize(
    ("document", "field", "line"),
    [
        ("", "policy_yaml", 1),
        ("- 1\n", "policy_yaml", 1),
        ("classes: {}\n", "tenant_id", 1),
        ("\ntenant_id: 123\n", "tenant_id", 2),
        ("tenant_id: null\n", "tenant_id", 1),
        ("tenant_id: on\n", "tenant_id", 1),
        ("tenant_id: [a]\n", "tenant_id", 1),
        ("tenant_id: ../x\n", "tenant_id", 1),
        ("tenant_id: a..b\n", "tenant_id", 1),
        ("tenant_id: A\n", "tenant_id", 1),
        ("tenant_id: a\ntenant_id: b\n", "tenant_id", 2),
        ("tenant_id: a\nquota: 1\n", "quota", 2),
        ("tenant_id: a\nclasses: [1]\n", "classes", 2),
        ("tenant_id: a\nclasses:\n", "classes", 2),
        ("tenant_id: a\nclasses:\n  gold: {weight: 1}\n", "classes.gold", 3),
        ("tenant_id: a\nclasses:\n  batch: 3\n", "classes.batch", 3),
        ("tenant_id: a\nclasses:\n  batch: {}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch:\n    weight: 0\n", "classes.batch.weight", 4),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1001}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1.5}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: '3'}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 0x10}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 010}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1:30}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: true}\n", "classes.batch.weight", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1, burst: 2}\n", "classes.batch.burst", 3),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1, token_bucket: 5}\n", "classes.batch.token_bucket", 3),
        (
            "tenant_id: a\nclasses:\n  batch: {weight: 1, token_bucket: {rate_tps: 5}}\n",
            "classes.batch.token_bucket.burst_tps",
            3,
        ),
        (
            "tenant_id: a\nclasses:\n  batch:\n    weight: 1\n    token_bucket:\n"
            "      burst_tps: 9\n      rate_tps: 0\n",
            "classes.batch.token_bucket.rate_tps",
            7,
        ),
        ("tenant_id: a\nclasses:\n  batch: {weight: 1, slo: {}}\n", "classes.batch.slo", 3),
        (
            "tenant_id: a\nclasses:\n  batch: {weight: 1, slo: {availability: 99.9}}\n",
            "classes.batch.slo.availability",
            3,
        ),
        ("tenant_id: a\nquotas: {concurrency: 0}\n", "quotas.concurrency", 2),
        ("tenant_id: a\nquotas: {requests_burst: 5}\n", "quotas.requests_burst", 2),
        ("tenant_id: a\nquotas:\n  kv_hbm_mb_hard: 5\n  kv_hbm_mb: 6\n", "quotas.kv_hbm_mb_hard", 3),
        ("tenant_id: a\nquotas:\n  kv_hbm_mb_reserve: 7\n  kv_hbm_mb: 6\n", "quotas.kv_hbm_mb", 4),
        ("tenant_id: a\nquotas: {tokens: 5}\n", "quotas.tokens", 2),
        ("tenant_id: a\nadapters: {pin: a}\n", "adapters.pin", 2),
        ("tenant_id: a\nadapters: {share_copies: yes}\n", "adapters.share_copies", 2),
        ("tenant_id: a\nadapters:\n  pin:\n  - a\n  - ../b\n", "adapters.pin[1]", 5),
        ("tenant_id: a\nadapters:\n  pin: [a,\n    a]\n", "adapters.pin[1]", 4),
        ("tenant_id: a\nadapters:\n  gate: {judge: exact}\n", "adapters.gate.samples", 3),
        ("tenant_id: a\nadapters:\n  gate: {samples: a, judge: taste}\n", "adapters.gate.judge", 3),
        ("tenant_id: a\nadapters:\n  gate:\n    samples: a\n    min_score: 1.5\n", "adapters.gate.min_score", 5),
        ("tenant_id: a\nadapters:\n  gate: {samples: a, max_drop: -0.1}\n", "adapters.gate.max_drop", 3),
        ("tenant_id: a\nadapters:\n  gate: {samples: A b}\n", "adapters.gate.samples", 3),
        ("tenant_id: a\nadapters:\n  compose: [a]\n", "adapters.compose", 3),
        ("tenant_id: a\nadapters:\n  compose: {A b: c}\n", "adapters.compose.'A b'", 3),
        ("tenant_id: a\nadapters:\n  compose: {x: a+b:0}\n", "adapters.compose.'x'", 3),
        ("tenant_id: a\nadapters:\n  compose: {x: a+x}\n", "adapters.compose.'x'", 3),
        ("tenant_id: a\nadapters:\n  compose: {x: [a]}\n", "adapters.compose.'x'", 3),
        ("tenant_id: a\nadapters:\n  compose:\n    x: a\n    x: b\n", "adapters.compose.'x'", 5),
        ("tenant_id: a\nadapters:\n  dedicated: [x]\n", "adapters.dedicated", 3),
        ("tenant_id: a\nadapters:\n  dedicated: {}\n", "adapters.dedicated", 3),
        ("tenant_id: a\nadapters:\n  dedicated: {X y: 1}\n", "adapters.dedicated", 3),
        ("tenant_id: a\nadapters:\n  dedicated: {[x]: 1}\n", "adapters.dedicated", 3),
        ("tenant_id: a\nadapters:\n  dedicated: {x: 0}\n", "adapters.dedicated.x", 3),
        ("tenant_id: a\nadapters:\n  dedicated:\n    x: 1\n    x: 2\n", "adapters.dedicated.x", 5),
        (
            f"tenant_id: a\nadapters:\n  dedicated: {{{', '.join(f'x{i}: 1' for i in range(9))}}}\n",
            "adapters.dedicated",
            3,
        ),
        ("tenant_id: a\nprefix_cache: friends\n", "prefix_cache", 2),
        ("tenant_id: a\nprefix_cache: {}\n", "prefix_cache", 2),
        ("tenant_id: a\nprefix_cache:\n  group: b\n  groups: [b]\n", "prefix_cache.groups", 4),
        ("tenant_id: a\nprefix_cache:\n  group: [b]\n", "prefix_cache.group", 3),
        ("tenant_id: a\nprefix_cache:\n  group: 7\n", "prefix_cache.group", 3),
        ("tenant_id: a\nprefix_cache: {group: B/c}\n", "prefix_cache.group", 2),
        ("tenant_id: a\nsecurity: {can_stream: yes}\n", "security.can_stream", 2),
        ("tenant_id: a\nsecurity: {can_stream: 1}\n", "security.can_stream", 2),
        ("tenant_id: a\nsecurity:\n  data_retention_days: 36501\n", "security.data_retention_days", 3),
        ("tenant_id: a\nsecurity:\n  data_retention_days: -1\n", "security.data_retention_days", 3),
        ("tenant_id: a\nquotas: {max_prompt_tokens: 0}\n", "quotas.max_prompt_tokens", 2),
        ("tenant_id: a\nlimits: {max_prompt_tokens: 5}\n", "limits", 2),
        ("tenant_id: a\n? [x]\n: 1\n", "policy_yaml", 2),
        ("tenant_id: a\nb: &x 1\n", "policy_yaml", 2),
        ("tenant_id: a\nb: *x\n", "policy_yaml", 2),
        ("tenant_id: a\n<<: {classes: 1}\n", "<<", 2),
        ("tenant_id: !!python/object/apply:os.system [ls]\n", "policy_yaml", 1),
        ("tenant_id: !x a\n", "policy_yaml", 1),
        ("tenant_id: a\n---\ntenant_id: b\n", "policy_yaml", 2),
        ("tenant_id: {a\n", "policy_yaml", 2),
        ("tenant_id: a\n\tb: 1\n", "policy_yaml", 2),
        ("[" * 5000, "policy_yaml", 1),
        ("{a: " * 3000, "policy_yaml", 1),
    ],
)
def test_errors_have_their_line(document: str, field: str, line: int) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_policy(document)
    assert [v.field for v in error.value.violations] == [field]
    assert error.value.violations[0].description.startswith(f"line {line}: ")


def test_every_error_is_told() -> None:
    document = "tenant_id: 5\nclasses:\n  batch: {weight: -1}\n  gold: 1\nquotas:\n  max_output_tokens: x\nextra: 1\n"
    with pytest.raises(InvalidRequest) as error:
        parse_policy(document)
    assert [(v.field, v.description.split(":")[0]) for v in error.value.violations] == [
        ("tenant_id", "line 1"),
        ("classes.batch.weight", "line 3"),
        ("classes.gold", "line 4"),
        ("quotas.max_output_tokens", "line 6"),
        ("extra", "line 7"),
    ]


def test_errors_come_in_the_order_of_their_lines() -> None:
    """Also those that two fields make together, so that no list ends before them."""
    document = "tenant_id: a\nquotas:\n  kv_hbm_mb: 9\n  kv_hbm_mb_hard: 5\nextra: 1\n"
    with pytest.raises(InvalidRequest) as error:
        parse_policy(document)
    assert [v.field for v in error.value.violations] == ["quotas.kv_hbm_mb_hard", "extra"]


def test_what_is_too_much_is_refused_before_it_is_read() -> None:
    for document in ("#" * (MAX_DOCUMENT_BYTES + 1), "tenant_id: a\x00", "\ud800"):
        with pytest.raises(InvalidRequest):
            parse_policy(document)
    with pytest.raises(InvalidRequest) as error:
        parse_policy("\n".join(f"k{i}: 1" for i in range(1500)))
    assert len(error.value.violations) == 25
    assert "1477 more" in error.value.violations[-1].description


FULL = """\
tenant_id: a
classes:
  interactive:
    weight: 8
    token_bucket: {rate_tps: 20, burst_tps: 80}
    slo: {ttft_p95_ms: 300, availability: 0.999}
quotas:
  requests_per_s: 5
  requests_burst: 10
  concurrency: 6
  max_queued: 7
  resumes_per_s: 12
  resumes_burst: 13
  monthly_spend: 500
  max_prompt_tokens: 8
  max_output_tokens: 9
  kv_hbm_mb: 10
  kv_hbm_mb_hard: 11
  kv_hbm_mb_reserve: 3
adapters:
  pin: [one, two]
  share_copies: true
  gate: {samples: golden, judge: contains, min_score: 0.9, max_drop: 0, min_gain: 0.25, max_tokens: 64, timeout_s: 30}
  compose: {both: one+two@3:0.50}
  dedicated: {one: 2, two: 1}
security: {can_stream: false, data_retention_days: 0}
"""


def test_everything_that_the_grammar_has() -> None:
    policy = parse_policy(FULL)
    assert policy == TenantPolicy(
        TenantId("a"),
        {
            QosClass.INTERACTIVE: ClassPolicy(8, TokenRate(20, 80), Slo(300, 0.999)),
            QosClass.STANDARD: ClassPolicy(2),
            QosClass.BATCH: ClassPolicy(1),
        },
        TenantLimits(8, 9),
        TenantQuotas(5, 10, 6, 7, 12, 13, 500, 10, 11, 3),
        (AdapterName("one"), AdapterName("two")),
        TenantSecurity(can_stream=False),
        share_copies=True,
        adapter_gate=GateRule("golden", "contains", 0.9, 0.0, 0.25, 64, 30),
        compositions={AdapterName("both"): "one+two@3:0.5"},
        dedicated={AdapterName("one"): 2, AdapterName("two"): 1},
    )


def test_copies_are_a_tenants_own_unless_it_shares_them() -> None:
    digest = AdapterDigest("ab" * 32)
    own = parse_policy("tenant_id: a\n")
    assert (own.copy_of(digest), own.to_yaml().count("adapters")) == (f"{digest}@a", 0)
    shared = parse_policy("tenant_id: a\nadapters: {share_copies: true}\n")
    assert shared.copy_of(digest) == digest
    assert parse_policy(shared.to_yaml()) == shared


def test_a_field_is_found_at_its_line() -> None:
    lines = FULL.splitlines()
    for path in ("adapters.pin", "quotas.concurrency", "classes.interactive.slo", "tenant_id"):
        assert lines[line_of(FULL, path) - 1].strip().startswith(path.rpartition(".")[2] + ":")
    assert line_of(FULL, "adapters.other") == 1


@settings(deadline=None)
@given(st.text(st.sampled_from("abtenant_id:classes{}[]\"'&*!|>-#, \n\t0"), max_size=80))
def test_any_text_is_a_policy_or_refused(document: str) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_policy(document)


@pytest.mark.parametrize(
    ("written", "share"), [("0.999", 0.999), ('"99.9%"', 0.999), ("99.9999%", 0.999999), ("50%", 0.5)]
)
def test_availability_is_a_share_or_a_percentage(written: str, share: float) -> None:
    policy = parse_policy(f"tenant_id: a\nclasses:\n  batch: {{weight: 1, slo: {{availability: {written}}}}}\n")
    assert policy.classes[QosClass.BATCH].slo == Slo(availability=share)
    assert parse_policy(policy.to_yaml()) == policy


@pytest.mark.parametrize("written", ["100%", "49.9%", "9%", "99.9 %", '"-99%"', "099.9%"])
def test_a_percentage_has_the_bounds_of_a_share(written: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a share"):
        parse_policy(f"tenant_id: a\nclasses:\n  batch: {{weight: 1, slo: {{availability: {written}}}}}\n")


def test_what_is_kept_and_what_is_scrubbed_of_it() -> None:
    policy = parse_policy(
        'tenant_id: a\nsecurity: {data_retention_days: 7, scrub_names: [Ann, "O\'Neil \\"x\\" 名"]}\n'
    )
    assert policy.security.data_retention_days == 7
    assert policy.security.scrub_names == ("Ann", 'O\'Neil "x" 名')
    assert parse_policy(policy.to_yaml()) == policy


@pytest.mark.parametrize(
    "written", ["Ann", "[A]", "[[Ann]]", '[" Ann"]', '["A\\nnn"]', f"[{'x' * 129}]", f"[{'Ann, ' * 257}]"]
)
def test_names_to_scrub_have_bounds(written: str) -> None:
    with pytest.raises(InvalidRequest, match="scrub_names"):
        parse_policy(f"tenant_id: a\nsecurity: {{scrub_names: {written}}}\n")


def test_pools_are_a_list_of_names() -> None:
    assert parse_policy("tenant_id: a").pools == ("default",)
    policy = parse_policy("tenant_id: a\npools: [small, default]\n")
    assert policy.pools == ("small", "default")
    assert parse_policy(policy.to_yaml()) == policy
    assert "pools" not in parse_policy("tenant_id: a\npools: [default]\n").to_yaml()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pools: small", "pools: line 2: must be a list of pools' names"),
        ("pools: []", "pools: line 2: has 0 names, and at least one is needed"),
        ("pools: [a, a]", "pools[1]: line 2: a is given twice"),
        ("pools: [A]", "pools[0]: line 2: 'A' has 'A'; a name is of a-z 0-9 . _ -"),
        ("pools: [{a: b}]", "pools[0]: line 2: must be one of the pools' names"),
        (f"pools: [{', '.join(f'p{i}' for i in range(17))}]", "pools: line 2: has 17 names, more than 16"),
    ],
)
def test_pools_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_policy(f"tenant_id: a\n{text}")
    assert [f"{v.field}: {v.description}" for v in error.value.violations] == [problem]


def test_a_class_speculates_where_its_policy_says_so() -> None:
    policy = parse_policy("tenant_id: a\nclasses: {batch: {weight: 1, speculation: prompt_lookup}}\n")
    assert policy.classes_with("prompt_lookup") == {QosClass.BATCH}
    drafting = parse_policy("tenant_id: a\nclasses: {batch: {weight: 1, speculation: draft}}\n")
    assert drafting.classes_with("draft") == {QosClass.BATCH}
    assert parse_policy(drafting.to_yaml()) == drafting
    assert parse_policy(policy.to_yaml()) == policy
    assert "speculation" not in parse_policy("tenant_id: a\nclasses: {batch: {weight: 1, speculation: off}}").to_yaml()
    with pytest.raises(
        InvalidRequest, match=r"classes\.batch\.speculation: line 2: must be prompt_lookup, draft or off"
    ):
        parse_policy("tenant_id: a\nclasses: {batch: {weight: 1, speculation: guess}}\n")
