"""What the demo reports: shares of right answers, and everything that went wrong."""

from __future__ import annotations

import dataclasses

from manylora.client.answers import Choice, Result, Timings, Usage
from manylora.demo.measure import MAX_REPORTED_FAILURES, TENANTS, Answer, DemoTenant, Task, _report, table

VERSIONS = {each.tenant: f"v-{each.tenant}" for each in TENANTS}
FIRST, SECOND, *_ = TENANTS


def answer(owner: DemoTenant, sender: DemoTenant, text: str | None = None, *, sent_s: float = 0.0) -> Answer:
    """text: None: what the sender's skill makes of it."""
    said = sender.skill.answer("abcd") if text is None else text
    usage = Usage(prompt_tokens=4, completion_tokens=10)
    result = Result(
        "r", VERSIONS[sender.tenant], 0, "completed", (Choice(said, ()),), usage, Timings(), f"w-{sender.tenant}"
    )
    return Answer(Task(owner, sender, "abcd"), result, "", sent_s, sent_s + 0.25, sent_s + 1.0)


def good() -> tuple[list[Answer], list[Answer]]:
    own = [answer(t, t) for t in TENANTS]
    cross = [answer(t, next(o for o in TENANTS if o is not t), "wrong") for t in TENANTS]
    return own, cross


def test_own_answers_that_are_right_and_others_that_are_not_are_ok() -> None:
    report = _report(*good(), VERSIONS)
    assert report.ok
    assert report.requests == 2 * len(TENANTS)
    tenant = report.tenants[0]
    assert (tenant.exact_match, tenant.cross_exact_match, tenant.requests) == (1.0, 0.0, 1)
    assert (tenant.ttft_ms_p50, tenant.tokens_per_s) == (250.0, 10.0)
    columns, rows = table(report)
    assert all(len(row) == len(columns) for row in rows)


def test_anothers_adapter_that_has_the_skill_is_not_ok() -> None:
    own, cross = good()
    cross[0] = answer(FIRST, SECOND, FIRST.skill.answer("abcd"))
    report = _report(own, cross, VERSIONS)
    assert not report.ok
    assert report.tenants[0].cross_exact_match == 1.0
    assert report.failures == ()


def test_failed_requests_and_other_versions_are_told_a_few_of_them() -> None:
    own, cross = good()
    own += [dataclasses.replace(answer(FIRST, FIRST), result=None, error="UNAVAILABLE: gone")] * 20
    report = _report(own, cross, VERSIONS)
    assert not report.ok
    assert report.failures == (f"{FIRST.tenant}: UNAVAILABLE: gone",) * MAX_REPORTED_FAILURES
    own, cross = good()
    report = _report(own, cross, VERSIONS | {SECOND.tenant: "another"})
    assert len(report.failures) >= 1
    assert "not 'another'" in report.failures[0]
