"""What counts against each tenant and what its share is, kept until something of that changes."""

from __future__ import annotations

from manylora_shared.ids import AdapterName, AdapterUid
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.pins import Pin, PinBook
from manylora_worker.adapters.residency import Residency
from manylora_worker.adapters.standings import Standings

from tests.worker.pure.adapter_rooms import DEVICE, HOST, room_of, wanted, weight_of
from tests.worker.pure.rooms import A, B


class Books:
    def __init__(self) -> None:
        rooms = {HOST: room_of(20, HOST), DEVICE: room_of(10)}
        self.residency = Residency(FakeAdapterBackend(lambda: 0.0), rooms, {HOST: 2, DEVICE: 2})
        self.order = LoadOrder(weight_of)
        self.pins = PinBook(10, weight_of)
        self.standings = Standings(self.residency, self.order, self.pins)

    def put(self, name: str, size_bytes: int) -> None:
        entry = self.residency.entry(AdapterUid(name))
        entry.on_host = entry.on_device = True
        self.residency.learn_size(entry, size_bytes)
        self.residency.touch(entry, A, 1.0)
        self.residency.rooms[DEVICE].entries[entry.uid] = entry


def test_shares_follow_what_is_claimed_and_waited_for() -> None:
    books = Books()
    books.put("x", 8)
    assert books.standings.of(DEVICE).shares == {A: 8}
    books.order.add(B, wanted("y", 7))
    standing = books.standings.of(DEVICE)
    assert (standing.held, standing.shares) == ({A: 8}, {A: 5, B: 5})


def test_what_is_known_is_kept_until_a_claim_or_a_queue_changes() -> None:
    books = Books()
    books.put("x", 8)
    known = books.standings.of(DEVICE)
    assert books.standings.of(DEVICE) is known
    assert books.standings.of(DEVICE, more=(B, 6)).shares == {A: 5, B: 5}
    assert books.standings.of(DEVICE) is known, "what was asked beside it is not kept"
    books.put("y", 1)
    changed = books.standings.of(DEVICE)
    assert changed.held == {A: 9}
    books.standings.clear()
    assert books.standings.of(DEVICE) is not changed


def test_pins_are_a_floor_on_the_device_alone() -> None:
    books = Books()
    books.put("x", 8)
    books.residency.entries[AdapterUid("x")].pinned_by[A] = None
    books.pins.set({A: [Pin(AdapterName("n"), AdapterUid("x"), 8)]}, 1)
    books.order.add(B, wanted("y", 7))
    assert books.standings.of(DEVICE).shares == {A: 8, B: 2}
    books.pins.resolve(lambda uid: 0)
    assert books.standings.claims_version == books.residency.claims_version + books.pins.version
