"""Both runtimes keep one contract; the thread's own troubles come after."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
from manylora_shared.errors import AlreadyExists, InvalidRequest, Overloaded, ServiceUnavailable
from manylora_sim import loop as simulation
from manylora_sim.fake_runner import reference_tokens
from manylora_sim.loop_runtime import LoopRuntime
from manylora_worker.hosting import view as engine_view
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS, EndKind, OutputStream, StreamEnd
from manylora_worker.kinds.api import AdapterTier, Sampled, StepBatch

from tests.worker.worker_fakes import UID, Engine, config, eventually, make_engine, request

_SHORT_S = 1e-4
"""Of a thread's step: one without any wait would keep the interpreter from the event loop, as no model does."""


async def drain(stream: OutputStream) -> tuple[dict[int, list[int]], StreamEnd]:
    tokens: dict[int, list[int]] = {}
    while True:
        batch = await stream.read()
        for output in batch.outputs:
            tokens.setdefault(output.choice, []).extend(output.token_ids)
        if batch.end is not None:
            return tokens, batch.end


@pytest.fixture(params=["thread", "loop"])
def is_threaded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "thread")


async def test_outputs_are_the_references(is_threaded: bool) -> None:
    engine = make_engine(config(), threaded=is_threaded)
    engine.runtime.start()
    streams = [engine.runtime.submit(request(f"r{i}", prompt_token_ids=tuple(range(1, 9 + i)))) for i in range(20)]
    for i, (tokens, end) in enumerate(await asyncio.gather(*(drain(s) for s in streams))):
        assert end.kind is EndKind.COMPLETED
        assert tokens == {0: reference_tokens(range(1, 9 + i), None, 3, 0, 8)}
    await engine.runtime.stop()
    engine.assert_empty()


async def test_refusals(is_threaded: bool) -> None:
    engine = make_engine(config(sequence_slots=1, parked_sequences=0), threaded=is_threaded)
    engine.runtime.start()
    long = request("long", max_tokens=5000)
    streams = [engine.runtime.submit(long)]
    with pytest.raises(AlreadyExists, match="request_id"):
        engine.runtime.submit(long)
    with pytest.raises(InvalidRequest, match="n: "):
        engine.runtime.submit(request("wide", n=2))
    streams += [engine.runtime.submit(request(f"r{i}", max_tokens=5000)) for i in range(3)]
    with pytest.raises(Overloaded):
        engine.runtime.submit(request("too many"))
    await engine.runtime.stop()
    for stream in streams:
        assert (await drain(stream))[1].kind is EndKind.ABORTED
    engine.assert_empty()


async def test_abort_and_stop_choice_take_effect(is_threaded: bool) -> None:
    engine = make_engine(config(), threaded=is_threaded)
    engine.runtime.start()
    aborted = engine.runtime.submit(request("aborted", max_tokens=4000))
    stopped = engine.runtime.submit(request("stopped", max_tokens=200, n=2))
    await aborted.read()
    await stopped.read()
    engine.runtime.abort(aborted.request.request_id)
    engine.runtime.stop_choice(stopped.request.request_id, 0)
    assert (await drain(aborted))[1].kind is EndKind.ABORTED
    tokens, end = await drain(stopped)
    assert end.kind is EndKind.COMPLETED
    assert len(tokens[0]) < 150
    assert len(tokens[1]) > len(tokens[0])
    await engine.runtime.stop()
    engine.assert_empty()


async def test_a_slow_reader_is_paused_and_goes_on_where_it_stood(is_threaded: bool) -> None:
    engine = make_engine(config(sequence_slots=2), threaded=is_threaded, step_s=_SHORT_S * is_threaded)
    engine.runtime.start()
    wanted = PAUSE_UNREAD_TOKENS + 500
    streams = [engine.runtime.submit(request(f"r{i}", max_tokens=wanted, n=2)) for i in range(2)]
    await eventually(lambda: all(stream.is_paused for stream in streams))
    await eventually(lambda: engine.runtime.view.stats.running_sequences == 0)
    # Both slots are free though no request has ended, and the thread sleeps.
    (flow,) = engine.runtime.view.loads()
    assert engine.runtime.view.loads() == {flow: (0, 0, 4)}
    assert not engine.core.has_work()
    other = engine.runtime.submit(request("other", max_tokens=20))
    assert (await drain(other))[1].kind is EndKind.COMPLETED
    for stream in streams:
        tokens, end = await drain(stream)
        assert end.kind is EndKind.COMPLETED
        for choice in range(2):
            assert tokens[choice] == reference_tokens(stream.request.prompt_token_ids, None, 3, choice, wanted)
    await engine.runtime.stop()
    engine.assert_empty()


async def test_who_does_not_read_for_too_long_is_cut_off_and_what_is_unread_is_bounded(
    is_threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_view, "MAX_PAUSE_S", 0.2)
    engine = make_engine(config(), threaded=is_threaded, step_s=_SHORT_S * is_threaded)
    engine.runtime.start()
    stream = engine.runtime.submit(request(max_tokens=PAUSE_UNREAD_TOKENS + 4000))
    await eventually(lambda: stream.is_ended)
    tokens, end = await drain(stream)
    assert end.kind is EndKind.SLOW_READER
    assert f"{PAUSE_UNREAD_TOKENS} tokens" in end.message
    assert PAUSE_UNREAD_TOKENS <= len(tokens[0]) < PAUSE_UNREAD_TOKENS + 1000
    await engine.runtime.stop()
    engine.assert_empty()


async def test_a_failed_adapter_ends_its_request_with_the_reason(is_threaded: bool) -> None:
    engine = make_engine(
        config(),
        threaded=is_threaded,
        error_of=lambda uid, tier: "its digest is wrong" if tier is AdapterTier.HOST else None,
    )
    engine.runtime.start()
    _, end = await drain(engine.runtime.submit(request(adapter_uid=UID)))
    assert (end.kind, end.message) == (EndKind.ADAPTER_FAILED, "its digest is wrong")
    await engine.runtime.stop()
    engine.assert_empty()


async def test_prefetch_reaches_the_device(is_threaded: bool) -> None:
    engine = make_engine(config(), threaded=is_threaded)
    engine.runtime.start()
    engine.runtime.prefetch(UID)
    await eventually(lambda: engine.runtime.view.adapters.get(UID) is AdapterTier.DEVICE)
    await engine.runtime.stop()


class Bug(Exception):
    pass


def break_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(batch: StepBatch) -> Sequence[Sampled]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "execute", execute)


async def test_one_failed_step_fails_its_requests_and_many_fail_the_engine(
    is_threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(config(), threaded=is_threaded)
    break_model(engine, monkeypatch)
    reasons: list[str] = []
    engine.runtime.view.when_failed(reasons.append)
    engine.runtime.start()
    for i in range(2):
        _, end = await drain(engine.runtime.submit(request(f"r{i}")))
        assert (end.kind, end.message) == (EndKind.ERROR, "the step failed: RuntimeError: the device is gone")
        assert not reasons
    _, end = await drain(engine.runtime.submit(request("last")))
    assert end.kind is EndKind.ENGINE_FAILED
    await eventually(lambda: bool(reasons))
    with pytest.raises(ServiceUnavailable, match="the engine has failed"):
        engine.runtime.submit(request("after"))
    await engine.runtime.stop()


async def test_a_bug_in_the_engine_ends_every_stream(is_threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(config(), threaded=is_threaded)
    engine.runtime.start()
    streams = [engine.runtime.submit(request(f"r{i}", max_tokens=4000)) for i in range(3)]
    for stream in streams:
        await stream.read()

    def fail(now: float) -> None:
        raise Bug("unforeseen")

    monkeypatch.setattr(engine.core, "begin_step", fail)
    for stream in streams:
        _, end = await drain(stream)
        assert (end.kind, end.message) == (EndKind.ENGINE_FAILED, "the engine has failed: Bug: unforeseen")
    assert not engine.runtime.view.running
    assert engine.runtime.view.failure == "Bug: unforeseen"
    await engine.runtime.stop()


async def test_progress_is_turns_and_rest_is_known_from_standing_still(is_threaded: bool) -> None:
    engine = make_engine(config(sequence_slots=1), threaded=is_threaded, step_s=0.01)
    runtime = engine.runtime
    runtime.start()
    await eventually(lambda: runtime.progress().is_at_rest)
    before = runtime.progress().turns
    stream = runtime.submit(request(max_tokens=4))
    assert not runtime.progress().is_at_rest, "a command is there"
    await drain(stream)
    assert runtime.progress().turns >= before + 4
    await eventually(lambda: runtime.progress().is_at_rest)
    await runtime.stop()


async def test_an_engine_that_is_given_up_ends_its_streams_and_is_left_behind() -> None:
    engine = make_engine(config(), threaded=True)
    is_in_step, hung = threading.Event(), threading.Event()

    def execute(batch: StepBatch) -> Sequence[Sampled]:
        is_in_step.set()
        hung.wait()
        return []

    engine.runner.execute = execute  # type: ignore[method-assign]
    engine.runtime.start()
    stream = engine.runtime.submit(request())
    await eventually(is_in_step.is_set)
    engine.runtime.give_up("it has stood still for 10 s")
    _, end = await drain(stream)
    assert end.kind is EndKind.ENGINE_FAILED
    assert end.message.startswith("the engine has failed: it has stood still for 10 s, in ")
    assert __file__ in end.message, "where it stands"
    async with asyncio.timeout(3):
        await engine.runtime.stop()
    assert not engine.backend.is_closed
    hung.set()


def test_reads_gather_what_comes_within_the_interval_but_not_the_first_token_and_not_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = make_engine(config(), step_s=0.01)
        engine.runtime.start()
        stream = engine.runtime.submit(request(max_tokens=40))
        first = await stream.read(interval_s=0.055)
        assert len(first.outputs) == 1
        assert loop.time() == pytest.approx(0.01)
        second = await stream.read(interval_s=60.0)
        assert len(second.outputs) == 6
        assert loop.time() == pytest.approx(5 / 64), "the next 64th of a second after 0.065"
        last = await stream.read()
        assert len(last.outputs) == 33
        assert last.end is not None
        assert loop.time() == pytest.approx(0.4)
        await engine.runtime.stop()

    simulation.run(main(), seed=1)


@pytest.mark.parametrize(("max_tokens", "frames"), [(10, [1, 9]), (11, [1, 6, 4])])
def test_a_frame_waits_for_an_end_that_is_near(max_tokens: int, frames: list[int]) -> None:
    async def main() -> None:
        engine = make_engine(config(), step_s=0.01)
        engine.runtime.start()
        stream = engine.runtime.submit(request(max_tokens=max_tokens))
        sizes: list[int] = []
        while not stream.is_ended:
            sizes.append(len((await stream.read(interval_s=0.055)).outputs))  # the second at 5/64 s, with six
        assert sizes == frames
        await engine.runtime.stop()

    simulation.run(main(), seed=1)


def test_streams_that_were_read_at_different_times_are_flushed_together() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = make_engine(config(), step_s=0.01)
        engine.runtime.start()
        flushed: list[float] = []

        async def read(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            stream = engine.runtime.submit(request(name, max_tokens=40))
            await stream.read(interval_s=0.055)
            await stream.read()
            flushed.append(loop.time())
            while not stream.is_ended:
                await stream.read()

        await asyncio.gather(read("a", 0.0), read("b", 0.004))
        assert flushed[0] == flushed[1] == pytest.approx(5 / 64)
        await engine.runtime.stop()

    simulation.run(main(), seed=1)


async def test_the_thread_sleeps_while_there_is_nothing_to_do() -> None:
    engine = make_engine(config(), threaded=True)
    engine.runtime.start()
    await drain(engine.runtime.submit(request()))
    await asyncio.sleep(0.02)
    turns = 0

    def count(timeout_s: float | None) -> None:
        nonlocal turns
        turns += 1

    original = engine.core.begin_step
    engine.core.begin_step = lambda now: (count(None), original(now))[1]  # type: ignore[method-assign]
    await asyncio.sleep(0.05)
    assert turns == 0
    await engine.runtime.stop()


async def test_the_thread_sleeps_while_an_adapter_is_loaded_and_wakes_when_it_has_come() -> None:
    engine = make_engine(config(), threaded=True, load_s=0.3)
    thread = engine.runtime
    loop = asyncio.get_running_loop()
    engine.backend.when_due = lambda due: loop.call_soon_threadsafe(loop.call_at, due + 0.001, engine.mailbox.wake)
    turns = 0
    original = engine.core.begin_step

    def begin_step(now: float) -> StepBatch | None:
        nonlocal turns
        turns += 1
        return original(now)

    engine.core.begin_step = begin_step  # type: ignore[method-assign]
    thread.start()
    _, end = await drain(thread.submit(request(adapter_uid=UID, max_tokens=2)))
    assert end.kind is EndKind.COMPLETED
    assert turns < 40, "a look every 2 ms is 300"
    await thread.stop()


def test_an_engine_hears_of_an_adapter_at_once_and_does_not_look_for_it_meanwhile() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = make_engine(config(), load_s=0.37, step_s=0.01)
        loop_runtime = engine.runtime
        assert isinstance(loop_runtime, LoopRuntime)
        loop_runtime.start()
        stream = loop_runtime.submit(request(adapter_uid=UID))
        await stream.read()
        assert loop.time() == pytest.approx(2 * 0.37 + 0.01), "to the host, to the device, and one step"
        assert loop_runtime.num_changes < 20, "a look every 2 ms is 370"
        await loop_runtime.stop()

    simulation.run(main(), seed=1)


def test_the_loop_runtime_is_the_same_in_every_run_of_the_simulation() -> None:
    async def main() -> list[tuple[float, int]]:
        rng = random.Random(4)
        engine = make_engine(config(num_blocks=24), load_s=0.3, step_s=0.01)
        engine.runtime.start()
        streams = []
        for i in range(12):
            await asyncio.sleep(rng.random() / 10)
            streams.append(engine.runtime.submit(request(f"r{i}", adapter_uid=UID if i % 2 else None, n=1 + i % 3)))
        ends = [(await drain(stream))[1].request_end for stream in streams]
        await engine.runtime.stop()
        engine.assert_empty()
        return [(end.ended_s, hash(end.request_id) and int(end.request_id[1:])) for end in ends if end is not None]

    one = simulation.run(main(), seed=5)
    other = simulation.run(main(), seed=5)
    assert one.result == other.result
    assert len(one.result) == 12
