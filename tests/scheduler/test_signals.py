"""What a pool wants: a stated model, and what must hold of it whatever it sees."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from manylora_scheduler.gates.signals import HORIZON_S, LOOK_S, TARGET_LOAD, PoolSignals, Seen, Signals, Trend

RATES = st.floats(0.0, 1e6, allow_nan=False)
PARTS = st.floats(0.0, 1.0)


def seen(**what: float) -> Seen:
    given: dict[str, float] = {
        "workers": 2, "wanted_tps": 100.0, "done_tps": 100.0, "queued": 0, "queue_s": 0.0, "slots_part": 0.5,
        "kv_part": 0.1, "adapter_loads_part": 0.0,
    }  # fmt: skip
    return Seen(**{**given, **what})  # type: ignore[arg-type]


def looked(signals: PoolSignals, times: int, **what: float) -> Signals:
    found = [signals.look(seen(**what), LOOK_S * i) for i in range(times)]
    return found[-1]


@given(st.integers(0, 5), RATES)
def test_who_is_dedicated_is_not_scaled_away(dedicated: int, rate: float) -> None:
    found = looked(PoolSignals(), 5, workers=dedicated + 1, dedicated=dedicated, wanted_tps=rate, done_tps=rate)
    assert found.workers_wanted >= dedicated + 1


@given(RATES, st.integers(1, 50))
def test_what_does_not_change_is_predicted_as_it_is(rate: float, times: int) -> None:
    trend = Trend()
    for _ in range(times):
        trend.add(rate)
    assert trend.after(HORIZON_S) == pytest.approx(rate)


@given(st.floats(0.0, 1000.0), st.floats(0.0, 100.0))
def test_what_grows_evenly_is_predicted_as_it_will_be(begin: float, step: float) -> None:
    trend = Trend()
    for i in range(300):
        trend.add(begin + step * i)
    expected = begin + step * (299 + HORIZON_S / LOOK_S)
    assert trend.after(HORIZON_S) == pytest.approx(expected, rel=0.01, abs=1e-6)


@given(st.lists(RATES, min_size=1, max_size=40), st.floats(0.1, 10.0))
def test_a_prediction_is_never_below_zero_and_of_no_unit(rates: list[float], factor: float) -> None:
    one, other = Trend(), Trend()
    for rate in rates:
        one.add(rate)
        other.add(factor * rate)
    assert one.after(HORIZON_S) >= 0.0
    assert other.after(HORIZON_S) == pytest.approx(factor * one.after(HORIZON_S), rel=1e-6, abs=1e-3)


@given(
    st.lists(
        st.builds(
            Seen, workers=st.integers(0, 50), wanted_tps=RATES, done_tps=RATES, queued=st.integers(0, 100),
            queue_s=RATES, slots_part=PARTS, kv_part=PARTS, adapter_loads_part=PARTS,
        ),
        min_size=1,
        max_size=30,
    )
)  # fmt: skip
@example([Seen(1, 0.0, 2e-313, 0, 0.0, 0.0, 1.0, 0.0), Seen(1, 1.0, 0.0, 0, 0.0, 0.0, 0.0, 0.0)])
def test_what_is_wanted_has_bounds(pool: list[Seen]) -> None:
    signals = PoolSignals()
    for i, each in enumerate(pool):
        told = signals.look(each, 5.0 * i)
        assert 1 <= told.workers_wanted <= 2 * each.workers + 1
        assert told.capacity_tps >= 0.0
        assert told.predicted_tps >= 0.0


@given(st.integers(1, 20), st.floats(0.1, 0.8), st.floats(10.0, 1e5))
def test_a_pool_that_is_not_busier_than_it_should_be_wants_no_more(workers: int, busy: float, rate: float) -> None:
    told = looked(PoolSignals(), 20, workers=workers, wanted_tps=rate, done_tps=rate, slots_part=busy)
    assert told.load == pytest.approx(busy)
    assert told.workers_wanted <= workers


def test_more_is_wanted_than_there_is() -> None:
    told = looked(PoolSignals(), 20, workers=4, wanted_tps=600.0, done_tps=400.0, slots_part=1.0)
    assert (told.capacity_tps, told.load) == (400.0, 1.5)
    assert told.workers_wanted == 8, f"600 tokens at {TARGET_LOAD} of 100 each"


def test_a_queue_before_full_memory_wants_one_more() -> None:
    told = looked(PoolSignals(), 3, workers=3, wanted_tps=1.0, done_tps=1.0, slots_part=0.4, kv_part=0.97, queued=5)
    assert told.workers_wanted == 4


def test_a_pool_without_workers_wants_one_and_one_that_idles_keeps_what_was_learned() -> None:
    signals = PoolSignals()
    assert signals.look(seen(workers=0, queued=3), 0.0).workers_wanted == 1
    busy = signals.look(seen(slots_part=1.0), 10.0)
    idle = signals.look(seen(wanted_tps=0.0, done_tps=0.0, slots_part=0.0), 20.0)
    assert busy.capacity_tps == idle.capacity_tps == 100.0
    assert idle.load == 0.0
