"""What a tenant is likely to ask for next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.ids import AdapterUid, TenantId
from manylora_worker.adapters.prediction import FORGET_S, LIKELY, MAX_ADAPTERS, MAX_TENANTS, Prediction

A, B = TenantId("a"), TenantId("b")
X, Y, Z = (AdapterUid(name) for name in "xyz")


def test_what_followed_comes_first_then_what_is_asked_for_most() -> None:
    prediction = Prediction()
    found: list[AdapterUid] = []
    for number in range(12):
        for uid in (X, Y):
            found = prediction.asked(A, [uid], float(number))
        if number % 3 == 0:
            prediction.asked(A, [Z], float(number))
    assert found == [X, Z]
    assert prediction.asked(A, [X], 12.0) == [Y, Z]


def test_one_request_is_no_habit_and_another_tenants_habits_are_its_own() -> None:
    prediction = Prediction()
    assert prediction.asked(A, [X], 0.0) == []
    assert prediction.asked(A, [Y], 0.0) == []
    for _ in range(5):
        prediction.asked(A, [X], 0.0)
    assert prediction.asked(B, [Y], 0.0) == []
    assert prediction.asked(A, [Y], 0.0) == [X]


def test_an_hour_later_it_is_forgotten() -> None:
    prediction = Prediction()
    for _ in range(50):
        prediction.asked(A, [X], 0.0)
    assert prediction.asked(A, [Y], FORGET_S) == [X]
    assert prediction.asked(A, [Y], 2 * FORGET_S + 1) == []


def test_parts_of_a_composition_are_not_told_of_one_another() -> None:
    prediction = Prediction()
    for number in range(9):
        assert set(prediction.asked(A, [X, Y], float(number))) <= {Z}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.floats(0, 300)), max_size=400))
def test_it_is_bounded(asked: list[tuple[int, int, float]]) -> None:
    prediction, now = Prediction(), 0.0
    for tenant, adapter, wait_s in asked:
        now += wait_s
        uid = AdapterUid(f"u{adapter}")
        found = prediction.asked(TenantId(f"t{tenant}"), [uid], now)
        assert len(found) <= LIKELY
        assert uid not in found
    for habits in prediction._tenants.values():
        assert len(habits._scores) <= MAX_ADAPTERS
        assert habits._successors.keys() <= habits._scores.keys()


def test_tenants_are_bounded() -> None:
    prediction = Prediction()
    for number in range(MAX_TENANTS + 5):
        prediction.asked(TenantId(f"t{number}"), [X], 0.0)
    assert len(prediction._tenants) == MAX_TENANTS
