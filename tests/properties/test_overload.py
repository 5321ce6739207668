"""The ladder and its controllers: the order of sacrifice, what a level takes, and that an end of the load ends it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.gates.demand import Demand
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import (
    ALLOWED_PART,
    HOLD_PART,
    LEVELS,
    STACK,
    LevelController,
    OverloadView,
    Rung,
    Sample,
    TenantView,
    class_of,
    error_of,
    kept_part,
    output_cap,
    place_of,
    retry_after_s,
    rung_of,
)

IDS = [f"{random.Random(i).getrandbits(128):032x}" for i in range(200)]
INTERACTIVE, STANDARD, BATCH = STACK
costs = st.lists(
    st.tuples(*[st.floats(0.0, 1e5, allow_subnormal=False).map(lambda c: 0.0 if c < 1.0 else c) for _ in STACK]),
    min_size=1,
    max_size=8,
)


def demand_of(tenants: Sequence[tuple[float, ...]], granted: float, *, exactly: bool = False) -> Demand:
    demand = Demand(lambda flow: 1, exact=len(tenants) if exactly else 256)
    for number, by_class in enumerate(tenants):
        for qos_class, cost in zip(STACK, by_class, strict=True):
            if cost:
                demand.came(FlowKey(TenantId(f"t{number}"), qos_class), cost, 0.0)
    demand.was_granted(granted, 0.0)
    demand.weigh(0.0)
    return demand


def view_of(level: int, demand: Demand) -> OverloadView:
    """As the scheduler makes it, unrounded."""
    qos_class = class_of(level)
    limit = math.inf if qos_class is None else demand.limit(qos_class, kept_part(level, rung_of(level)))
    return OverloadView(level, limit, {t: TenantView(demand.tops(t)) for t in demand.tenants()})


@given(costs, st.floats(1.0, 1e6), st.integers(0, LEVELS - 1))
@settings(deadline=None, derandomize=True)
def test_each_level_gives_up_what_the_one_below_it_did(
    tenants: list[tuple[float, float, float]], granted: float, level: int
) -> None:
    demand = demand_of(tenants, granted)
    lower, higher = view_of(level, demand), view_of(level + 1, demand)
    for tenant_id in [*demand.tenants(), TenantId("unknown")]:
        for qos_class in QosClass:
            for request_id in IDS[:40]:
                if higher.admits(tenant_id, qos_class, request_id):
                    assert lower.admits(tenant_id, qos_class, request_id)
                if higher.keeps(tenant_id, qos_class, request_id):
                    assert lower.keeps(tenant_id, qos_class, request_id)
    caps = [math.inf if cap is None else cap for cap in (output_cap(level), output_cap(level + 1))]
    assert caps[1] <= caps[0]


@pytest.mark.long
@given(
    costs,
    st.floats(1.0, 1e6),
    st.integers(0, LEVELS),
    st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, LEVELS), st.floats(0.0, 4.0))),
)
@settings(deadline=None, derandomize=True)
def test_the_order_of_sacrifice(
    tenants: list[tuple[float, float, float]],
    granted: float,
    level: int,
    own: dict[int, tuple[int, float]],
) -> None:
    """Of requests above a share: interactive of a tenant without a level of its own goes after all batch and standard,
    queued or not, and after the capping of batch; and so on down the ladder."""
    demand = demand_of(tenants, granted)
    view = view_of(level, demand)
    known = dict(view.tenants)
    for number, (own_level, limit) in own.items():
        known[TenantId(f"t{number}")] = TenantView((1.0, 2.0, 3.0), own_level, limit)
    view = OverloadView(view.level, view.limit, known)
    without_own = [t for t in [*demand.tenants(), TenantId("unknown")] if view.tenants.get(t, TenantView()).level == 0]
    everybody = [*demand.tenants(), *known, TenantId("unknown")]

    def some_excluded(qos_class: QosClass) -> bool:
        return any(not view.admits(t, qos_class, r) for t in without_own for r in IDS)

    def any_kept(qos_class: QosClass) -> bool:
        above = [t for t in everybody if not view.is_within(t, qos_class)]
        return any(
            view.keeps(t, qos_class, r) or view.admits(t, qos_class, r) for t in above for r in beyond(t, qos_class)
        )

    def beyond(tenant_id: TenantId, qos_class: QosClass) -> list[str]:
        return [r for r in IDS if view.height_of(tenant_id, qos_class, r) >= 1.0]

    def all_capped(tenants: list[TenantId]) -> bool:
        cap = output_cap(LEVELS)
        return all(view.output_cap(t, BATCH, r) == cap for t in tenants for r in beyond(t, BATCH))

    batch_above = [t for t in without_own if not view.is_within(t, BATCH)]
    if some_excluded(INTERACTIVE):
        assert not any_kept(STANDARD)
    if some_excluded(STANDARD) or some_excluded(INTERACTIVE):
        assert not any_kept(BATCH)
        assert all_capped(batch_above)
    if any(not view.keeps(t, BATCH, r) for t in batch_above for r in IDS):
        above = [t for t in everybody if not view.is_within(t, BATCH)]
        assert not any(view.admits(t, BATCH, r) for t in above for r in beyond(t, BATCH))
        assert all_capped(batch_above)
    for qos_class in (STANDARD, INTERACTIVE):
        assert all(view.output_cap(t, qos_class, r) is None for t in everybody for r in IDS[:5])


@given(costs, st.floats(1.0, 1e6), st.integers(0, LEVELS))
@settings(deadline=None, derandomize=True)
def test_the_furthest_above_its_share_goes_first(
    tenants: list[tuple[float, float, float]], granted: float, level: int
) -> None:
    demand = demand_of(tenants, granted)
    view = view_of(level, demand)
    for qos_class in QosClass:
        above = [t for t in demand.tenants() if not view.is_within(t, qos_class)]
        requests = [(view.height_of(t, qos_class, r), t, r) for t in above for r in IDS[:40]]
        gone = [height for height, t, r in requests if not view.admits(t, qos_class, r)]
        kept = [height for height, t, r in requests if view.admits(t, qos_class, r)]
        assert not gone or not kept or max(kept) <= min(gone)


def share_of_one(tenants: Sequence[tuple[float, ...]], granted: float) -> float:
    """A unit of weight's max-min fair part, by bisection: Demand finds it by another way."""
    weights = [sum(cost > 0 for cost in by_class) or 1 for by_class in tenants]
    low, high = 0.0, max(map(sum, tenants)) + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        given_out = sum(min(sum(by_class), middle * weight) for by_class, weight in zip(tenants, weights, strict=True))
        low, high = (middle, high) if given_out <= granted else (low, middle)
    return low


@pytest.mark.long
@given(costs, st.floats(2.0, 1e6), st.integers(0, LEVELS), st.lists(st.integers(0, LEVELS), min_size=8, max_size=8))
@settings(max_examples=4000, deadline=None, derandomize=True)
def test_nothing_is_taken_of_whoever_is_within_its_share(
    tenants: list[tuple[float, float, float]], granted: float, level: int, own: list[int]
) -> None:
    """The guarantee of docs/POLICY.md, over random demands, whatever the levels are."""
    demand = demand_of(tenants, granted)
    cluster = view_of(level, demand)
    known: dict[TenantId, TenantView] = {}
    for t, tenant in cluster.tenants.items():
        interactive, standard, batch = (round(64 * top) / 64 for top in tenant.tops)  # as the gate tells them
        known[t] = TenantView((interactive, standard, batch), own[int(t[1:])], 0.0)
    view = OverloadView(level, cluster.limit, known)
    unit = share_of_one(tenants, granted)
    for number, by_class in enumerate(tenants):
        tenant_id, weight = TenantId(f"t{number}"), sum(cost > 0 for cost in by_class) or 1
        for index, qos_class in enumerate(STACK):
            if sum(by_class[: index + 1]) <= unit * weight:
                assert view.place_limit(tenant_id, qos_class) >= 1.0
                assert all(
                    view.admits(tenant_id, qos_class, r) and view.keeps(tenant_id, qos_class, r) for r in IDS[:5]
                )
                assert all(view.output_cap(tenant_id, qos_class, r) is None for r in IDS[:5])
    assert all(view.admits(TenantId("unlisted"), qos_class, IDS[0]) for qos_class in QosClass)


@given(costs, st.floats(1.0, 1e6), st.sampled_from(STACK), st.integers(0, 32))
@settings(deadline=None, derandomize=True)
def test_a_limit_leaves_the_wanted_part(
    tenants: list[tuple[float, float, float]], granted: float, qos_class: QosClass, wanted: int
) -> None:
    demand = demand_of(tenants, granted)
    index = STACK.index(qos_class)
    total = sum(by_class[index] for by_class in tenants)
    limit = demand.limit(qos_class, wanted / 32)
    left = 0.0
    for number, by_class in enumerate(tenants):
        tops = demand.tops(TenantId(f"t{number}"))
        below, top = tops[index - 1] if index else 0.0, tops[index]
        if top > below:
            left += by_class[index] * min(max((limit - below) / (top - below), 0.0), 1.0)
    assert left == pytest.approx(wanted / 32 * total, rel=1e-6, abs=1e-3)


@given(costs, st.floats(2.0, 1e6))
@settings(deadline=None, derandomize=True)
def test_shares_are_max_min_fair(tenants: list[tuple[float, float, float]], granted: float) -> None:
    demand = demand_of(tenants, granted)
    demands = {TenantId(f"t{i}"): sum(by_class) for i, by_class in enumerate(tenants) if sum(by_class)}
    got = {t: cost / max(demand.tops(t)[-1], 1.0) for t, cost in demands.items()}
    # What it would get if nobody got more than a share: never more than there is, unless all demand is met.
    assert sum(got.values()) == pytest.approx(min(1.1 * granted, sum(demands.values())), rel=1e-6)
    above = [t for t in demands if demand.tops(t)[-1] > 1.0 + 1e-9]
    # A tenant weighs as much as the flows that it uses: here one each.
    by_weight = {t: got[t] / sum(cost > 0 for cost in tenants[int(t[1:])]) for t in got}
    assert all(by_weight[t] >= max(by_weight.values()) * (1 - 1e-6) for t in above)


@pytest.mark.wide
@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0.05, 2.0), st.sampled_from(STACK), st.floats(0.05, 0.95))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_many_tenants_are_measured_nearly_as_few_are(
    spread: int, seed: int, fits: float, qos_class: QosClass, part: float
) -> None:
    """Beyond a bucket's or a sample's size shares and limits are estimates: against the exact ones of all tenants."""
    rng = random.Random(seed)
    by_class = [tuple(math.exp(rng.gauss(3.0, spread / 3)) for _ in STACK) for _ in range(3000)]
    granted = fits * sum(map(sum, by_class))
    estimated = demand_of(by_class, granted)
    estimated.check_invariants()
    exact = demand_of(by_class, granted, exactly=True)
    known, true = estimated.tops(TenantId("t0"))[-1], exact.tops(TenantId("t0"))[-1]
    assert known == pytest.approx(true, rel=0.02)
    index = STACK.index(qos_class)
    limit = estimated.limit(qos_class, part)
    left = 0.0
    for number, costs_of in enumerate(by_class):
        tops = estimated.tops(TenantId(f"t{number}"))
        below, top = tops[index - 1] if index else 0.0, tops[index]
        left += costs_of[index] * min(max((limit - below) / (top - below), 0.0), 1.0)
    assert left == pytest.approx(part * sum(c[index] for c in by_class), abs=0.12 * sum(c[index] for c in by_class))
    furthest = estimated.furthest(100)
    assert len(set(furthest)) == 100
    least = min(estimated.tops(t)[-1] for t in furthest)
    others = sorted((estimated.tops(t)[-1] for t in estimated.tenants()), reverse=True)
    assert least >= others[99] / 1.1, "none of those that are much further is left out"


@given(st.integers(0, LEVELS), st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3)), st.sampled_from(STACK))
@settings(deadline=None, derandomize=True)
def test_the_limit_of_places_is_that_of_heights(
    level: int, parts: tuple[float, float, float], qos_class: QosClass
) -> None:
    tops = (parts[0], parts[0] + parts[1], sum(parts))
    tenant_id = TenantId("t")
    view = OverloadView(level, 1.3, {tenant_id: TenantView(tops, LEVELS - level, 0.7)})
    limit = view.place_limit(tenant_id, qos_class)
    for request_id in IDS:
        assert (place_of(request_id) < limit) == view.keeps(tenant_id, qos_class, request_id) or math.isclose(
            place_of(request_id), limit
        )


samples = st.dictionaries(
    st.sampled_from(list(QosClass)),
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)).map(
        lambda c: Sample(max(c), sorted(c)[1], min(c))
    ),
)


@pytest.mark.long
@given(st.lists(st.tuples(samples, st.floats(0.01, 1.0), st.sampled_from([0.0, 0.0, 0.3]))))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_level_stays_on_the_ladder_and_comes_down_when_the_load_ends(
    steps: list[tuple[dict[QosClass, Sample], float, float]],
) -> None:
    controller = LevelController()
    for measured, dt_s, free_part in steps:
        controller.step(measured, dt_s, free_part=free_part)
        assert 0 <= controller.level <= LEVELS
    for _ in range(80):  # eight seconds of an idle cluster
        controller.step({}, 0.1, free_part=1.0)
    assert controller.level == 0
    assert controller.is_idle
    assert vars(controller).keys() == vars(LevelController()).keys()


@given(samples)
@settings(deadline=None, derandomize=True)
def test_without_room_a_level_comes_down_to_turns(measured: dict[QosClass, Sample]) -> None:
    """Nobody is refused any more, but those who gave way go on to: they would be waited for again."""
    controller = LevelController()
    for _ in range(100):
        controller.step(measured, 0.1, free_part=0.0)
    was_up = controller.level > 0
    for _ in range(1500):
        controller.step({INTERACTIVE: Sample(5, 0, 0)}, 0.1, free_part=0.0)
    assert controller.level == was_up
    for _ in range(20):
        controller.step({}, 0.1, free_part=0.05)
    assert controller.level == 0


@pytest.mark.parametrize(
    ("qos_class", "end", "begin"), [(BATCH, 64, 16), (STANDARD, 96, 16), (INTERACTIVE, LEVELS, 96)]
)
def test_a_class_sacrifices_nothing_more_important_than_itself(qos_class: QosClass, end: int, begin: int) -> None:
    late, warned = LevelController(), LevelController()
    for _ in range(400):
        late.step({qos_class: Sample(10, 10, 10)}, 0.1, free_part=0.0)
        warned.step({qos_class: Sample(10, 10, 0)}, 0.1, free_part=0.0)
        assert late.level <= end, "not for a moment either"
        assert warned.level <= begin
    assert late.level == end
    assert begin - 8 < warned.level <= begin, "of its own it gives up nothing before the target itself is missed"


def test_no_single_moment_refuses_anybody() -> None:
    """A burst of waiting that is over within a second costs turns, and not one batch request."""
    controller = LevelController()
    for _ in range(100):
        controller.step({INTERACTIVE: Sample(10, 0, 0)}, 0.1, free_part=0.0)
    for _ in range(10):
        controller.step({INTERACTIVE: Sample(10, 10, 10)}, 0.1, free_part=0.0)
        assert rung_of(controller.level) in (Rung.NONE, Rung.TURNS)
        assert kept_part(controller.level, Rung.BATCH_ADMISSION) == 1.0
    for _ in range(100):
        controller.step({INTERACTIVE: Sample(10, 10, 10)}, 0.1, free_part=0.0)
    assert controller.level > 32, "what lasts does"


def test_a_little_room_brings_a_level_down_fast() -> None:
    controller = LevelController()
    for _ in range(600):
        controller.step({INTERACTIVE: Sample(10, 10, 10)}, 0.1, free_part=0.0)
    assert controller.level == LEVELS
    for _ in range(90):
        controller.step({}, 0.1, free_part=0.05)
    assert controller.level == 0


def test_the_more_important_class_moves_the_level_where_both_wait() -> None:
    controller = LevelController()
    both = {INTERACTIVE: Sample(10, 10, 10), BATCH: Sample(10, 10, 10)}
    for _ in range(400):
        controller.step(both, 0.1, free_part=0.0)
    assert controller.level == LEVELS


def test_between_the_two_bounds_a_level_holds() -> None:
    controller = LevelController()
    for _ in range(30):
        controller.step({INTERACTIVE: Sample(100, 100, 0)}, 0.1, free_part=0.0)
    between = round(100 * (HOLD_PART + ALLOWED_PART) / 2)
    for _ in range(100):
        controller.step({INTERACTIVE: Sample(100, between, 0)}, 0.1, free_part=0.0)
    held = controller.level
    assert 0 < held < 96
    for _ in range(300):
        controller.step({INTERACTIVE: Sample(100, between, 0)}, 0.1, free_part=0.0)
    assert controller.level == held
    assert error_of(ALLOWED_PART) == error_of(HOLD_PART) == 0.0
    assert error_of(0.0) == -1.0


def test_rungs_follow_one_another() -> None:
    assert [rung_of(level) for level in (0, 1, 16, 17, 32, 33, 48, 49, 64, 65, 96, 97, LEVELS)] == [
        Rung.NONE,
        *[Rung.TURNS] * 2,
        *[Rung.BATCH_ADMISSION] * 2,
        *[Rung.BATCH_OUTPUT] * 2,
        *[Rung.BATCH_QUEUE] * 2,
        *[Rung.STANDARD] * 2,
        *[Rung.INTERACTIVE] * 2,
    ]
    assert [output_cap(level) for level in (32, 33, 48, LEVELS)] == [None, 1024, 16, 16]


def test_places_are_even_and_hints_are_spread() -> None:
    places = sorted(place_of(f"{random.Random(i).getrandbits(128):032x}") for i in range(2000))
    assert all(abs(place - i / 2000) < 0.05 for i, place in enumerate(places))
    hints = [retry_after_s(64, request_id) for request_id in IDS]
    assert max(hints) / min(hints) > 2.5
    assert all(retry_after_s(LEVELS, r) > retry_after_s(1, r) >= 0.5 for r in IDS)
    assert max(retry_after_s(LEVELS, r) for r in IDS) <= 9.0


def test_a_refusal_says_whose_level_it_is() -> None:
    acme, birch = TenantId("acme"), TenantId("birch")
    tops = (1.0, 2.0, 3.0)
    tenants = {acme: TenantView(tops, 90, 0.7), birch: TenantView(tops, level=40)}
    view = OverloadView(40, 1.0, tenants, is_crowded=True)
    full = "(level {} of 128): this batch request is not taken now"
    own = "this tenant asks for more than its share of a full cluster "
    assert view.why_refused(acme, QosClass.BATCH) == own + full.format(90)
    for tenant_id in (birch, TenantId("unknown")):
        assert view.why_refused(tenant_id, QosClass.BATCH) == "the cluster is overloaded " + full.format(40)
