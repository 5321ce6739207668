from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.tenancy.adapter_line import (
    MAX_EVENTS,
    MAX_VERSIONS,
    AdapterVersion,
    Line,
    LineProblem,
    StickyKeys,
)
from manylora_shared.tenancy.trial import Decision, Plan, Verdict, begun

ANYBODY = StickyKeys("r")


def version(uid: str) -> AdapterVersion:
    return AdapterVersion(0, uid, 8, 100, ("q_proj",), 1.0)


def line_of(count: int) -> Line:
    line = Line(AdapterVersion(1, "uid-1", 8, 100, ("q_proj",), 1.0))
    for number in range(2, count + 1):
        line, _ = line.add(version(f"uid-{number}"), float(number))
    return line


def test_a_new_version_is_nobodys_who_does_not_ask_for_it() -> None:
    line, added = line_of(1).add(version("two"), 2.0)
    assert (added.number, line.in_force.number) == (2, 1)
    chosen = line.choose(None, ANYBODY)
    assert chosen is not None
    assert chosen.number == 1
    assert line.choose(2, ANYBODY) == added
    assert line.choose(3, ANYBODY) is None


def test_the_same_bytes_are_the_version_that_they_are() -> None:
    line = line_of(2)
    assert line.add(version("uid-1"), 9.0) == (line, line.in_force)
    retired = line.retire(2, 3.0)
    again, added = retired.add(version("uid-2"), 4.0)
    assert (added.number, again.version(2)) == (3, None)


def test_promote_and_roll_back_go_back_as_far_as_promotions_went() -> None:
    line = line_of(3).promote(2, 1.0).promote(3, 2.0)
    assert [line.in_force.number, line.roll_back(3.0).in_force.number] == [3, 2]
    assert line.roll_back(3.0).roll_back(4.0).in_force.number == 1
    with pytest.raises(LineProblem, match="no version was in force before"):
        line.roll_back(3.0).roll_back(4.0).roll_back(5.0)
    assert line.roll_back(3.0).promote(3, 4.0).roll_back(5.0).in_force.number == 2


def test_a_promotion_is_remembered_behind_any_number_of_other_changes() -> None:
    line = line_of(2).promote(2, 1.0)
    for number in range(2 * MAX_EVENTS):
        line, _ = line.add(replace(version(f"rejected-{number}"), state="rejected"), 2.0)
    assert len(line.events) == MAX_EVENTS
    assert line.events[-1].number == line.versions[-1].number
    assert line.roll_back(3.0).in_force.number == 1


def test_a_rollback_ends_a_rollout_first() -> None:
    line = line_of(3).promote(2, 1.0).roll_out(3, 10, "user", "s", 2.0)
    back = line.roll_back(3.0)
    assert (back.in_force.number, back.rollout) == (2, None)
    assert line.promote(0, 3.0).in_force.number == 3
    assert line_of(3).promote(0, 3.0).in_force.number == 3
    assert line_of(1).promote(0, 3.0) == line_of(1)


def test_what_somebody_gets_is_not_retired() -> None:
    line = line_of(3).roll_out(2, 10, "request", "s", 2.0)
    for number in (1, 2):
        with pytest.raises(LineProblem, match="in force or in a rollout"):
            line.retire(number, 3.0)
    retired = line.retire(3, 3.0)
    assert retired.version(3) is None
    assert retired.add(version("x"), 4.0)[1].number == 4
    with pytest.raises(LineProblem, match="is retired"):
        retired.promote(3, 5.0)


@pytest.mark.parametrize(
    ("to", "percent", "sticky", "field"),
    [(1, 10, "user", "to"), (9, 10, "user", "to"), (2, 101, "user", "percent"), (2, 10, "x", "sticky")],
)
def test_what_is_wrong_with_a_rollout_is_named(to: int, percent: int, sticky: str, field: str) -> None:
    with pytest.raises(LineProblem) as refused:
        line_of(2).roll_out(to, percent, sticky, "s", 1.0)
    assert refused.value.field == field


def test_lines_are_bounded() -> None:
    line = line_of(MAX_VERSIONS)
    with pytest.raises(LineProblem, match="retire some"):
        line.add(version("one more"), 1.0)
    for number in range(MAX_VERSIONS + 1, 5 * MAX_VERSIONS):
        line = line.retire(number - MAX_VERSIONS + 1, 1.0)
        line, added = line.add(version(f"uid-{number}"), 2.0)
        assert added.number == number
    assert len(line.events) == MAX_EVENTS
    assert len(AdapterRecord.of("acme", "up", line).to_json()) < 64_000


@pytest.mark.parametrize("percent", [0, 1, 10, 50, 99, 100])
def test_shares_are_as_asked(percent: int) -> None:
    line = line_of(2).roll_out(2, percent, "user", "salt", 1.0)
    chosen = [line.choose(None, StickyKeys(f"r{i}", user=f"u{i}")) for i in range(20_000)]
    share = sum(each is not None and each.number == 2 for each in chosen) / len(chosen)
    assert abs(share - percent / 100) < 0.02
    assert percent not in (0, 100) or share == percent / 100


@given(st.text(max_size=20), st.integers(0, 100), st.integers(0, 100))
def test_who_is_taken_stays_while_the_share_grows(user: str, one: int, other: int) -> None:
    low, high = sorted((one, other))
    keys = StickyKeys("any", user=user or "u")
    line = line_of(2).roll_out(2, low, "user", "first", 1.0)
    before = line.choose(None, keys)
    after = line.roll_out(2, high, "user", "another", 2.0).choose(None, keys)
    assert before is not None
    assert after is not None
    assert after.number >= before.number


def test_a_user_has_one_version_in_all_conversations_and_requests() -> None:
    line = line_of(2).roll_out(2, 50, "user", "salt", 1.0)
    chosen = {line.choose(None, StickyKeys(f"r{i}", f"c{i}", "me")) for i in range(50)}
    assert len(chosen) == 1
    without = {line.choose(None, StickyKeys(f"r{i}", f"c{i}")) for i in range(50)}
    assert len(without) == 2


def test_records_keep_lines_and_old_records_are_version_1() -> None:
    line = line_of(3).promote(2, 1.0).roll_out(3, 10, "user", "s", 2.0).retire(1, 3.0)
    record = AdapterRecord.of("acme", "up", line)
    assert (record.uid, record.number) == ("uid-2", 2)
    assert AdapterRecord.from_json(record.to_json()).line == line
    old = b'{"tenant_id":"acme","name":"up","uid":"u","max_lora_rank":8,"size_bytes":1,"target_modules":[]'
    old += b',"created_unix_s":1}'
    read = AdapterRecord.from_json(old).line
    assert [(each.number, each.uid) for each in read.served] == [(1, "u")]
    for wrong in (
        b'"others":[3]',
        b'"others":[{"number":2}]',
        b'"rollouts":[{"to":"x"}]',
        b'"rollouts":[{"to":2,"percent":9,"sticky":"?","salt":""}]',
        b'"events":{}',
    ):
        with pytest.raises(ValueError, match=r"AdapterRecord|Rollout"):
            AdapterRecord.from_json(old[:-1] + b"," + wrong + b"}")


def test_a_trials_verdicts_are_events_that_say_why() -> None:
    plan = Plan((5, 50), 10, 60.0, "trial")
    line = line_of(2).roll_out(2, 99, "user", "salt", 1.0, plan)
    assert line.rollout is not None
    assert (line.rollout.percent, line.rollout.trial, line.rollout.plan) == (5, "trial", begun(plan, 1.0))
    stepped = line.judged(Verdict(Decision.STEP, "so good", "requests", 50), 7.0)
    assert stepped.rollout is not None
    assert stepped.rollout.plan is not None
    assert (stepped.rollout.percent, stepped.rollout.salt, stepped.rollout.plan.step_since_unix_s) == (50, "salt", 7.0)
    promoted = stepped.judged(Verdict(Decision.PROMOTE, "so good", "requests"), 8.0)
    assert (promoted.in_force.number, promoted.rollout) == (2, None)
    back = stepped.judged(Verdict(Decision.ROLLBACK, "too bad", "errors"), 8.0)
    assert (back.in_force.number, back.rollout) == (1, None)
    told = [(e.change, e.number, e.percent, e.why) for e in (*back.events[-3:], promoted.events[-1])]
    assert told == [
        ("rollout", 2, 5, ""),
        ("rollout", 2, 50, "so good"),
        ("rollback", 1, 0, "too bad"),
        ("promote", 2, 0, "so good"),
    ]
    with pytest.raises(LineProblem, match="steps must grow"):
        line_of(2).roll_out(2, 0, "user", "salt", 1.0, Plan((5, 5), 10, 60.0, "trial"))
    by_hand = line.roll_out(2, 6, "user", "other", 2.0).rollout
    assert by_hand is not None
    assert (by_hand.plan, by_hand.trial) == (None, "salt")
