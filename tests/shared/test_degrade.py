"""What overload takes from answers, step by step, and of whom."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.degrade import FIRST_LEVEL, NOTHING, Degrade, Step, Taken, taken
from manylora_shared.tenancy.overload import LEVELS, OverloadView, TenantView
from manylora_shared.tenancy.policy import parse_policy

ACME = TenantId("acme")
ALL = Degrade((Step.SHORTER_OUTPUTS, Step.SMALLER_POOL, Step.NO_STREAM), "small")
TEXT = 'degrade: [shorter_outputs, {smaller_pool: "small"}, no_stream]'


def view(level: int, *tops: float) -> OverloadView:
    return OverloadView(level, 1.0, {ACME: TenantView(tops or (4.0, 4.0, 4.0))})  # type: ignore[arg-type]


def of(rule: Degrade, level: int, request_id: str = "b", *tops: float) -> Taken:
    return taken(rule, view(level, *tops), ACME, QosClass.INTERACTIVE, request_id)


def test_steps_come_one_after_the_other() -> None:
    far = next(f"r{i}" for i in range(99) if of(ALL, 60, f"r{i}") is not NOTHING)
    for level, steps in ((16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3), (128, 3)):
        assert of(ALL, level, far).steps == ALL.steps[:steps]
    assert of(ALL, 17, far).max_tokens == 1024
    assert of(ALL, LEVELS, far).max_tokens == 16
    assert of(Degrade((Step.NO_STREAM,)), 17, far).max_tokens is None
    assert of(Degrade(), LEVELS, far) is NOTHING


@given(st.integers(0, LEVELS), st.floats(0.0, 1.0), st.text(max_size=8), st.sampled_from(QosClass))
def test_nothing_is_taken_of_who_is_within_its_share(level: int, top: float, request_id: str, c: QosClass) -> None:
    assert taken(ALL, view(level, top, top, top), ACME, c, request_id) is NOTHING
    assert taken(ALL, OverloadView(level), ACME, c, request_id) is NOTHING, "one that is not listed counts as within"


@given(st.integers(FIRST_LEVEL, LEVELS), st.floats(1.5, 100.0))
def test_each_tenant_keeps_as_much_as_one_share(level: int, top: float) -> None:
    rng = random.Random(1)
    ids = [f"{rng.getrandbits(128):032x}" for _ in range(400)]
    kept = [r for r in ids if of(ALL, level, r, top, top, top) is NOTHING]
    assert len(kept) / 400 == pytest.approx(1.0 / top, abs=0.1)


@given(st.integers(FIRST_LEVEL, LEVELS - 1))
def test_answers_get_no_longer_as_levels_rise(level: int) -> None:
    lower, higher = (Taken(each, (Step.SHORTER_OUTPUTS,)).max_tokens for each in (level, level + 1))
    assert lower is not None
    assert higher is not None
    assert 16 <= higher <= lower <= 1024


def test_a_policy_says_what_may_be_taken() -> None:
    policy = parse_policy(f"tenant_id: a\npools: [default, small]\n{TEXT}\n")
    assert policy.degrade == ALL
    assert TEXT in policy.to_yaml()
    assert parse_policy(policy.to_yaml()) == policy
    assert parse_policy("tenant_id: a\ndegrade: []\n").degrade == Degrade()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("degrade: yes", "degrade: line 2: must be a list of shorter_outputs, smaller_pool, no_stream"),
        ("degrade: [faster]", "degrade[0]: line 2: must be shorter_outputs, no_stream, or {smaller_pool: NAME}"),
        ("degrade: [smaller_pool]", "degrade[0]: line 2: must be shorter_outputs, no_stream, or {smaller_pool: NAME}"),
        ("degrade: [no_stream, no_stream]", "degrade[1]: line 2: no_stream is given twice"),
        ("degrade: [{smaller_pool: A}]", "degrade[0].smaller_pool: line 2: 'A' has 'A'"),
        ("degrade: [{smaller_pool: b}]", "degrade: line 2: b is none of this policy's pools"),
        ("degrade: [{other: a}]", "degrade[0]: line 2: must be shorter_outputs, no_stream, or {smaller_pool: NAME}"),
    ],
)
def test_what_is_no_step_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_policy(f"tenant_id: a\n{text}")
    (violation,) = error.value.violations
    assert f"{violation.field}: {violation.description}".startswith(problem)
