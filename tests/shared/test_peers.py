"""The secret by which services know one another."""

from __future__ import annotations

import random
from typing import Any

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.peers import PeerSecret
from manylora_shared.errors import Unauthenticated
from manylora_shared.metadata import PEER_KEY
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer


class Shown:
    def __init__(self, **metadata: str) -> None:
        self.metadata = {PEER_KEY: metadata["secret"]} if metadata else {}


def check(secret: PeerSecret, shown: Any) -> bool:
    try:
        secret.check(shown)
    except Unauthenticated:
        return False
    return True


def test_whoever_comes_first_makes_it_and_all_have_the_same() -> None:
    async def main() -> None:
        store = MemoryStoreServer(random.Random(1)).client()
        first, second = PeerSecret(), PeerSecret()
        await first.load(store, random.Random(1).getrandbits)
        await second.load(store, random.Random(2).getrandbits)
        stored = await store.get(keys.PEER_SECRET)
        assert stored is not None
        assert first.metadata() == second.metadata() == {PEER_KEY: stored.value.decode()}
        assert len(stored.value) == 64
        assert check(second, Shown(secret=stored.value.decode()))
        assert not check(second, Shown(secret=stored.value.decode()[:-1]))
        assert not check(second, Shown())

    run(main(), seed=1)


def test_before_it_is_loaded_it_refuses_everybody() -> None:
    secret = PeerSecret()
    for shown in (Shown(), Shown(secret="")):
        with pytest.raises(Unauthenticated):
            secret.check(shown)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [b"", b"\xff", b"two words", b"line\n"])
def test_what_is_no_secret_is_refused_by_its_key(stored: bytes) -> None:
    async def main() -> None:
        store = MemoryStoreServer(random.Random(1)).client()
        await store.put(keys.PEER_SECRET, stored)
        with pytest.raises(ValueError, match=f"{keys.PEER_SECRET} in the store: is no secret"):
            await PeerSecret().load(store, random.Random(1).getrandbits)

    run(main(), seed=1)
