"""Steps that are begun and not ended."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Mapping

import pytest
from manylora_shared.ids import QosClass
from manylora_sim.fake_runner import AheadFakeRunner, FakeRunner, FakeStep
from manylora_worker.engine.flights import Begun, Flights, chunk_of, part_of
from manylora_worker.kinds.api import RunnerLost, Sampled, StepBatch
from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.memory.block_pool import BlockWork
from manylora_worker.planning.slots import Scheduled

from tests.worker.pure.rooms import group_of, request_of


def scheduled(num_tokens: int = 8, *, samples: bool = True) -> Scheduled:
    sequence: Sequence = group_of(request_of()).sequences[0]
    sequence.move_to(SequenceStatus.PREFILL)
    sequence.block_table = [0, 1]
    return Scheduled(sequence, num_tokens, samples)


def submit(flights: Flights, item: Scheduled) -> None:
    flights.submit(StepBatch([chunk_of(item)]), Begun([part_of(item)], BlockWork(), 1.0, QosClass.STANDARD))


def test_one_step_at_a_time_unless_the_runner_takes_the_next() -> None:
    for kind, most in ((FakeRunner, 1), (AheadFakeRunner, 2)):
        flights = Flights(kind(num_blocks=4, block_size=4))
        while not flights.must_wait:
            submit(flights, scheduled())
        assert len(flights) == most
        flights.end()
        assert not flights.must_wait


def test_one_under_way_is_alone_where_another_may_be_begun_beside_it() -> None:
    flights = Flights(AheadFakeRunner(num_blocks=4, block_size=4))
    assert flights.alone is None
    submit(flights, scheduled(5))
    assert flights.alone is not None
    assert flights.alone.num_prefill_tokens == 5
    submit(flights, scheduled())
    assert flights.alone is None
    awaiting = Flights(AheadFakeRunner(num_blocks=4, block_size=4))
    item = scheduled()
    part = part_of(item)
    part.mask_follows = True
    awaiting.submit(StepBatch([chunk_of(item)]), Begun([part], BlockWork(), 1.0, QosClass.STANDARD))
    assert awaiting.alone is None, "its masks are to be drawn by, not rested beside"
    one_at_a_time = Flights(FakeRunner(num_blocks=4, block_size=4))
    submit(one_at_a_time, scheduled())
    assert one_at_a_time.alone is None


def test_a_step_that_the_runner_refuses_has_its_error_as_its_result() -> None:
    flights = Flights(FakeRunner(num_blocks=1, block_size=4))
    assert not flights.is_over
    submit(flights, scheduled())
    assert flights.is_over
    assert isinstance(flights.wait(), Exception)
    assert len(flights) == 1, "it is still to be ended"


def test_an_answer_of_another_batch_or_beyond_the_vocabulary_is_an_error() -> None:
    flights = Flights(FakeRunner(num_blocks=4, block_size=4, vocab_size=50))
    item = scheduled()
    submit(flights, item)
    result = flights.wait()
    flight = flights.end()
    mine = item.sequence.holding_id
    assert not isinstance(flights.checked(flight, result), Exception)
    wrong = [[], [Sampled(mine + 1, 3)], [Sampled(mine, 3), Sampled(mine, 3)], [Sampled(mine, 50)], [Sampled(mine, -1)]]
    for answer in wrong:
        assert isinstance(flights.checked(flight, answer), RuntimeError)
    assert not isinstance(flights.checked(flight, [Sampled(mine, -1, error="not finite")]), Exception)


def test_a_part_tells_what_is_new_from_what_is_computed_again() -> None:
    item = scheduled(6, samples=False)
    item.sequence.num_charged_tokens = 4
    part = part_of(item)
    assert (part.num_new_tokens, part.num_recomputed_tokens, part.end) == (2, 4, 6)
    item.sequence.move_to(SequenceStatus.DECODE)
    assert (part_of(item).num_new_tokens, part_of(item).num_recomputed_tokens) == (0, 0)


def test_a_chunk_is_what_comes_next_of_the_sequence() -> None:
    item = scheduled(3, samples=False)
    item.sequence.num_computed_tokens = 4
    chunk = chunk_of(item)
    assert (chunk.start_position, tuple(chunk.token_ids), chunk.samples) == (4, (4, 5, 6), False)
    assert (chunk.output_index, tuple(chunk.block_table)) == (0, (0, 1))


class Activations:
    """What a step has on the device."""


class NoRoom(RuntimeError):
    pass


class Device:
    """Has no room. It knows what is still there of what was made on it."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Activations]] = []

    @property
    def num_held(self) -> int:
        assert self._made
        return sum(each() is not None for each in self._made)

    def make(self) -> Activations:
        made = Activations()
        self._made.append(weakref.ref(made))
        return made

    def forward(self) -> None:
        activations = self.make()
        try:
            self._head()
        except MemoryError as error:
            raise NoRoom(id(activations)) from error

    def _head(self) -> None:
        logits = self.make()
        raise MemoryError(id(logits))


class FailingStep(FakeStep):
    def __init__(self, device: Device, where: str) -> None:
        self._device = device
        self._where = where

    def is_over(self) -> bool:
        return True

    def draw(self, masks: Mapping[int, bytes]) -> None:
        if self._where == "draw":
            self._device.forward()

    def result(self) -> list[Sampled]:
        if self._where == "result":
            self._device.forward()
        return []


class FailingRunner(FakeRunner):
    def __init__(self, device: Device) -> None:
        super().__init__(num_blocks=4, block_size=4)
        self._device = device

    def execute(self, batch: StepBatch) -> list[Sampled]:
        self._device.forward()
        return []


class FailingAheadRunner(AheadFakeRunner):
    def __init__(self, device: Device, where: str) -> None:
        super().__init__(num_blocks=4, block_size=4)
        self._device = device
        self._where = where

    def submit(self, batch: StepBatch) -> FailingStep:
        if self._where == "submit":
            self._device.forward()
        return FailingStep(self._device, self._where)


@pytest.mark.parametrize("where", ["execute", "submit", "result", "draw"])
def test_nothing_of_a_failed_step_is_held_by_its_error(where: str) -> None:
    device = Device()
    flights = Flights(FailingRunner(device) if where == "execute" else FailingAheadRunner(device, where))
    item = scheduled()
    part = part_of(item)
    part.mask_follows = where == "draw"
    gc.disable()
    try:
        flights.submit(StepBatch([chunk_of(item)]), Begun([part], BlockWork(), 1.0, QosClass.STANDARD))
        if where in ("execute", "submit"):
            assert device.num_held == 0, "the next step may begin before this one is ended"
        error = flights.wait()
        flights.end()
        assert device.num_held == 0
        assert isinstance(error, NoRoom)
        told = "".join(traceback.format_exception(error))
        assert all(f"in {name}\n" in told for name in ("forward", "_head", "wait")), "the log says where it was"
        gone = weakref.ref(error)
        del error
        assert gone() is None, "it is in a cycle"
    finally:
        gc.enable()


class LostRunner(FakeRunner):
    def check(self) -> None:
        raise RunnerLost("a process has ended")

    def execute(self, batch: StepBatch) -> list[Sampled]:
        self.check()
        return []


def test_a_runner_that_is_lost_ends_more_than_a_step() -> None:
    Flights(FakeRunner(num_blocks=1, block_size=4)).check()
    flights = Flights(LostRunner(num_blocks=1, block_size=4))
    with pytest.raises(RunnerLost, match="a process has ended"):
        flights.check()
    with pytest.raises(RunnerLost):
        submit(flights, scheduled())
    assert not len(flights)
