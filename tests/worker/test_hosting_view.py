"""The engine as the event loop knows it: what is open, what is paused, and what each flow has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manylora_shared.errors import AlreadyExists, Overloaded, ServiceUnavailable
from manylora_shared.ids import RequestId, TenantId
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.counters import EngineStats, Setbacks
from manylora_worker.hosting.output_stream import EndKind
from manylora_worker.hosting.view import MAX_PAUSE_S, Command, EnginePost, EngineView, FlowLoad
from manylora_worker.kinds.api import TokenOutput
from manylora_worker.planning.step_planner import FlowSlots, PlannerLimits

from tests.worker.worker_fakes import request


def stats() -> EngineStats:
    limits = EngineLimits(PlannerLimits(16, 8, 2), AdapterCacheLimits(8, 8), max_requests=8)
    return EngineCore(FakeRunner(num_blocks=8, block_size=4), FakeAdapterBackend(lambda: 0.0), limits).stats()


def post(**fields: Any) -> EnginePost:
    nothing: dict[str, Any] = {
        "outputs": (), "ends": (), "stats": stats(), "flows": {}, "setbacks": {}, "kv_blocks": {}, "adapters": None,
        "tenant_adapters": None, "slots": None,
    }  # fmt: skip
    return EnginePost(**(nothing | fields))


class Sent:
    def __init__(self) -> None:
        self.commands: list[Command] = []

    def view(self, max_requests: int = 8) -> EngineView:
        return EngineView(stats(), max_requests, self.commands.append, pause_unread_tokens=4)


def test_who_is_let_in() -> None:
    async def main() -> None:
        view = Sent().view(max_requests=2)
        view.open(request("a"))
        with pytest.raises(AlreadyExists):
            view.open(request("a"))
        view.open(request("b"))
        with pytest.raises(Overloaded):
            view.open(request("c"))
        view.close()
        with pytest.raises(ServiceUnavailable):
            view.open(request("c"))
        view.fail("broken")
        with pytest.raises(ServiceUnavailable, match="broken"):
            view.open(request("c"))

    simulation.run(main(), seed=1)


def test_a_stream_that_is_not_read_is_paused_and_goes_on_when_it_is() -> None:
    async def main() -> None:
        sent = Sent()
        view = sent.view()
        stream = view.open(request("a", max_tokens=20))
        output = TokenOutput(RequestId("a"), 0, 0, (1, 2, 3, 4))
        view.take(post(outputs=[output]))
        assert stream.is_paused
        assert len(sent.commands) == 1
        await stream.read()
        assert not stream.is_paused
        assert len(sent.commands) == 2
        view.fail("ends the run")

    simulation.run(main(), seed=1)


def test_one_that_is_not_read_for_too_long_is_given_up() -> None:
    async def main() -> None:
        sent = Sent()
        view = sent.view()
        stream = view.open(request("a", max_tokens=20))
        view.take(post(outputs=[TokenOutput(RequestId("a"), 0, 0, (1, 2, 3, 4))]))
        await asyncio.sleep(MAX_PAUSE_S - 0.1)
        assert not stream.is_too_slow
        await asyncio.sleep(0.2)
        assert stream.is_too_slow
        view.fail("whatever comes then")
        end = (await stream.read()).end
        assert end is not None
        assert end.kind is EndKind.SLOW_READER

    simulation.run(main(), seed=1)


def test_a_flows_sequences_have_slots_or_are_held_or_wait_for_others() -> None:
    async def main() -> None:
        view = Sent().view()
        for name in ("a", "b", "c"):
            view.open(request(name, max_tokens=20))
        flow = next(iter(view.loads()))
        assert view.loads() == {flow: FlowLoad(0, 3, 0)}
        view.take(post(slots={flow: FlowSlots(1, False, 0)}))
        assert view.loads() == {flow: FlowLoad(1, 2, 0)}
        view.take(post(slots={flow: FlowSlots(1, True, 0)}))
        assert view.loads() == {flow: FlowLoad(1, 0, 2)}, "its own cap keeps it"
        view.take(post(slots={flow: FlowSlots(1, False, 1)}))
        assert view.loads() == {flow: FlowLoad(1, 1, 1)}, "one waits for its adapter"
        view.fail("ends the run")
        assert view.loads() == {}

    simulation.run(main(), seed=1)


def test_whose_setbacks_grew_last_stands_last() -> None:
    async def main() -> None:
        view = Sent().view()
        a, b = TenantId("a"), TenantId("b")
        for tenant, count in ((a, 1), (b, 1), (a, 2)):
            view.take(post(setbacks={tenant: Setbacks(preemptions=count)}))
        assert list(view.setbacks.items()) == [(b, Setbacks(1)), (a, Setbacks(2))]

    simulation.run(main(), seed=1)
