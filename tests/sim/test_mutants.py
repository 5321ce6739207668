"""The mutation gate: the simulation finds every planted bug of mutants.py, and finds nothing where nothing is planted.

A mutant's seeds are played as `make sim` plays them (one in ten with quotas) until one fails: first those that killed
it when it was last looked for, then 0, 1, ... up to MOST_SEEDS. Where a hint no longer kills (the product or the load
changed what its seed means) the search finds another seed, the gate still passes, and the table that the run ends with
says which seed it was: that is the new hint. A mutant that survives all of them fails the gate: the simulation lost a
check, a fault or a load that it had, or the bug cannot happen any more, and then the mutant goes.

Not part of the default run: `make mutants`.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from manylora_sim.loop import SimDeadlock, SimLimit

from tests.sim import test_cluster, test_quota_faults
from tests.sim.mutants import IDENTITY, MUTANTS, Mutant

pytestmark = pytest.mark.mutants

MOST_SEEDS = 100
"""A tenth of what `make sim SEEDS=1000` plays."""
IDENTITY_SEEDS = (*range(4), 10)
_KILLS = (AssertionError, SimDeadlock, SimLimit, ExceptionGroup, RuntimeError, TimeoutError)
"""What a failing seed raises. RuntimeError: an engine has failed. TimeoutError: the cluster does not come up again."""


@dataclass(frozen=True)
class Kill:
    seed: int
    seeds_played: int
    cpu_s: float
    why: str


def play(seed: int) -> None:
    """As `make sim` does."""
    if seed % test_quota_faults.EACH_NTH == 0:
        test_quota_faults.play(seed)
    else:
        test_cluster.play(seed)


def hunt(mutant: Mutant, seeds: Iterable[int], play: Callable[[int], object] = play) -> Kill | None:
    """The first seed that fails; None: the mutant survives them all."""
    began = time.process_time()
    with mutant.planted():
        for played, seed in enumerate(seeds, 1):
            try:
                play(seed)
            except _KILLS as error:
                return Kill(seed, played, time.process_time() - began, _why(error))
    return None


def _why(error: BaseException) -> str:
    """In one line: the message, or the line that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).splitlines()[0] if str(error) else f"{where.name}: {where.line}"
    return f"{type(error).__name__}: {text}"[:150]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_kills(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    seeds = dict.fromkeys((*mutant.first, *range(MOST_SEEDS)))
    kill = hunt(mutant, seeds)
    assert kill is not None, f"{mutant.name} survives {len(seeds)} seeds: {mutant.breaks}"
    record_property("mutant", (mutant.kind, mutant.name, kill.seed, kill.seeds_played, round(kill.cpu_s, 1), kill.why))


def test_what_changes_nothing_survives() -> None:
    """Else a kill would say nothing of the mutant: the seeds fail by themselves."""
    assert hunt(IDENTITY, IDENTITY_SEEDS) is None


def test_a_survivor_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MOST_SEEDS", 2)
    with pytest.raises(AssertionError, match="identity survives 2 seeds"):
        test_the_simulation_kills(IDENTITY, lambda name, value: None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_gone_after_its_block(mutant: Mutant) -> None:
    before = [change.standing for change in mutant.changes]
    with mutant.planted():
        assert not any(change.standing is each for change, each in zip(mutant.changes, before, strict=True))
    assert all(change.standing is each for change, each in zip(mutant.changes, before, strict=True))


def test_there_are_enough_and_each_has_its_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) >= 24
