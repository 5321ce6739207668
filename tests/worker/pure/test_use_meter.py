from __future__ import annotations

import random

import pytest
from manylora_shared.ids import AdapterUid, RequestId
from manylora_worker.adapters.use_meter import UseMeter

A, B = AdapterUid("a"), AdapterUid("b")


def test_users_share_what_they_use_together() -> None:
    meter = UseMeter()
    meter.begin(RequestId("1"), {A: 100}, 0.0)
    meter.begin(RequestId("2"), {A: 100, B: 10}, 2.0)
    assert meter.end(RequestId("1"), 4.0) == 100 * 2 + 50 * 2
    assert meter.end(RequestId("2"), 5.0) == 50 * 2 + 100 + 10 * 3
    assert meter.end(RequestId("unknown"), 9.0) == 0.0
    meter.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_to_what_was_in_use(seed: int) -> None:
    rng, meter = random.Random(seed), UseMeter()
    sizes = {A: 64, B: 7}
    users: dict[RequestId, list[AdapterUid]] = {}
    used = told = 0.0
    for now in range(200):
        used += sum(sizes[uid] for uid in {uid for uids in users.values() for uid in uids})
        if users and rng.random() < 0.5:
            user = rng.choice(list(users))
            del users[user]
            told += meter.end(user, now + 1.0)
        else:
            user = RequestId(str(now))
            users[user] = rng.choice(([A], [B], [A, B]))
            meter.begin(user, {uid: sizes[uid] for uid in users[user]}, now + 1.0)
        meter.check_invariants()
    told += sum(meter.end(user, 201.0) for user in users)
    used += sum(sizes[uid] for uid in {uid for uids in users.values() for uid in uids})
    assert told == pytest.approx(used)
