"""The target of a step is the least of the classes that run or wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.ids import QosClass
from manylora_worker.planning.step_targets import StepTargets

_TARGETS = st.none() | st.floats(0.001, 1)


@given(present=st.sets(st.sampled_from(QosClass)), targets=st.builds(StepTargets, _TARGETS, _TARGETS, _TARGETS))
def test_a_step_keeps_the_target_of_every_class_that_runs_or_waits(
    present: set[QosClass], targets: StepTargets
) -> None:
    kept = targets.among(present)
    wanted = [found for each in present if (found := targets.of(each)) is not None]
    assert (kept is None) == (not wanted)
    assert kept is None or (kept in wanted and all(kept <= each for each in wanted))


def test_each_class_has_the_target_of_its_name() -> None:
    targets = StepTargets(interactive=0.1, standard=0.2, batch=0.3)
    assert [targets.of(each) for each in (QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("name", ["interactive", "standard", "batch"])
def test_a_target_of_no_time_is_refused_by_its_class(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        StepTargets(**{name: 0.0})
