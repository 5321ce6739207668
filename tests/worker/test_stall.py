"""When an engine has stood still for too long."""

from __future__ import annotations

from collections.abc import Iterable

from manylora_worker.hosting.stall import LOOK_S, Progress, StallJudge


def looks(judge: StallJudge, seen: Iterable[Progress]) -> list[float]:
    return [stood_s for progress in seen if (stood_s := judge.look(progress)) is not None]


def still(turns: int, seconds: float) -> list[Progress]:
    """The first look at a turn is the one that sees it."""
    return [Progress(turns, False)] * (1 + round(seconds / LOOK_S))


def test_no_turn_for_the_bound_is_a_stall() -> None:
    judge = StallJudge(10.0)
    assert looks(judge, still(100, 9.5)) == []
    assert looks(judge, [Progress(100, False)]) == [10.0]


def test_rest_and_turns_are_no_stall() -> None:
    judge = StallJudge(10.0)
    assert looks(judge, [Progress(7, True)] * 1000) == []
    assert looks(judge, (Progress(turns, False) for turns in range(1000))) == []
    assert looks(judge, still(1000, 9.5)) == [], "what was at rest before has stood still since it was not"


def test_an_engine_that_is_slow_has_four_times_its_longest_turn() -> None:
    judge = StallJudge(10.0)
    assert looks(judge, [*still(100, 8.0), *still(101, 31.5)]) == []
    assert looks(judge, [Progress(101, False)]) == [32.0]


def test_its_first_turns_may_take_six_times_as_long() -> None:
    judge = StallJudge(10.0)
    assert looks(judge, still(1, 59.5)) == []
    assert looks(judge, [Progress(1, False)]) == [60.0]


def test_it_may_be_switched_off() -> None:
    assert looks(StallJudge(0.0), still(1, 3600)) == []
