"""The ring of workers: every one once, by distance."""

from __future__ import annotations

from manylora_scheduler.core.ring import Ring
from manylora_shared.ids import AdapterUid, WorkerId


def test_a_walk_meets_everybody_once_by_distance() -> None:
    ring = Ring()
    for i in range(20):
        ring.add(WorkerId(f"w{i}"))
    for i in range(50):
        uid = AdapterUid(f"uid{i}")
        order = list(ring.walk(uid))
        assert order == sorted(order, key=lambda w: ring.distance(uid, w))
        assert len(set(order)) == len(order) == 20
    ring.remove(WorkerId("w7"))
    assert WorkerId("w7") not in list(ring.walk(AdapterUid("uid")))
