"""The policy document: good ones come back equal, bad ones are refused with every error at its line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.policy import (
    DEFAULT_WEIGHTS,
    MAX_DOCUMENT_BYTES,
    ClassPolicy,
    TenantLimits,
    TenantPolicy,
    parse_policy,
)

names = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z").filter(lambda name: ".." not in name)
tokens = st.none() | st.integers(1, 1 << 30)
policies = st.builds(
    TenantPolicy,
    names.map(TenantId),
    st.fixed_dictionaries({c: st.integers(1, 1000).map(ClassPolicy) for c in QosClass}),
    st.builds(TenantLimits, tokens, tokens),
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
        ("tenant_id: a\nlimits: {max_prompt_tokens: 0}\n", "limits.max_prompt_tokens", 2),
        ("tenant_id: a\nlimits: {max_queued: 5}\n", "limits.max_queued", 2),
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
    document = "tenant_id: 5\nclasses:\n  batch: {weight: -1}\n  gold: 1\nlimits:\n  max_output_tokens: x\nextra: 1\n"
    with pytest.raises(InvalidRequest) as error:
        parse_policy(document)
    assert [(v.field, v.description.split(":")[0]) for v in error.value.violations] == [
        ("tenant_id", "line 1"),
        ("classes.batch.weight", "line 3"),
        ("classes.gold", "line 4"),
        ("limits.max_output_tokens", "line 6"),
        ("extra", "line 7"),
    ]


def test_what_is_too_much_is_refused_before_it_is_read() -> None:
    for document in ("#" * (MAX_DOCUMENT_BYTES + 1), "tenant_id: a\x00", "\ud800"):
        with pytest.raises(InvalidRequest):
            parse_policy(document)
    with pytest.raises(InvalidRequest) as error:
        parse_policy("\n".join(f"k{i}: 1" for i in range(1500)))
    assert len(error.value.violations) == 25
    assert "1477 more" in error.value.violations[-1].description


@settings(deadline=None)
@given(st.text(st.sampled_from("abtenant_id:classes{}[]\"'&*!|>-#, \n\t0"), max_size=80))
def test_any_text_is_a_policy_or_refused(document: str) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_policy(document)
