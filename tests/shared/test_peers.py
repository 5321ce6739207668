"""The secret by which services know one another."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from manylora_shared.coordination.peers import PeerSecret, PeerTransport, guarded
from manylora_shared.errors import Unauthenticated
from manylora_shared.metadata import PEER_KEY
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_sim.peers import SIMULATED

from tests.shared.transport_echo import METHODS, echo_service, text


class Shown:
    def __init__(self, **metadata: str) -> None:
        self.metadata = {PEER_KEY: metadata["secret"]} if metadata else {}


def check(secret: PeerSecret, shown: Any) -> bool:
    try:
        secret.check(shown)
    except Unauthenticated:
        return False
    return True


def test_whoever_comes_first_makes_the_file_and_all_have_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "peer.secret"
    found: list[PeerSecret] = []

    def read(seed: int) -> None:
        found.append(PeerSecret.of_file(path, random.Random(seed).getrandbits))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = path.read_text().strip()
    assert len(text) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert [each.metadata() for each in found] == [{PEER_KEY: text}] * 8
    assert check(found[0], Shown(secret=text))
    for wrong in (Shown(secret=text[:-1]), Shown(secret=""), Shown()):
        assert not check(found[0], wrong)
    assert text not in repr(found[0])


@pytest.mark.parametrize("stored", [b"", b"short", b"\xff" * 64, b"two words " * 8, b"line\n" * 32])
def test_what_is_no_secret_is_refused_by_its_file(stored: bytes, tmp_path: Path) -> None:
    path = tmp_path / "peer.secret"
    path.write_bytes(stored)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"peer\.secret: a secret of services has at least 32"):
        PeerSecret.of_file(path, random.Random(1).getrandbits)


def test_a_file_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.secret"
    path.write_text("s" * 64)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="its mode must be 0600 or 0640"):
        PeerSecret.of_file(path, random.Random(1).getrandbits)
    path.chmod(0o640)
    assert PeerSecret.of_file(path, random.Random(1).getrandbits).metadata() == {PEER_KEY: "s" * 64}


async def test_nothing_of_a_call_without_the_secret_is_parsed() -> None:
    server = await GrpcTransport().serve("127.0.0.1:0", [guarded(echo_service(), SIMULATED)])
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for method in METHODS.values():
                for shown in ((), ((PEER_KEY, "guessed"),)):
                    # One message for a stream of them too: `write` of a stream would replace the status by its own.
                    call = channel.unary_unary(method.path)(b"\xff no message", metadata=shown)
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, method.path
        known = PeerTransport(GrpcTransport(), SIMULATED).connect(server.address)
        assert (await known.call(METHODS["Unary"], text("known"), timeout=30)).text == "known"
        assert (await known.stream(METHODS["ServerStream"], text("a,b"), timeout=30).read()).text == "a"
        await known.close()
    finally:
        await server.stop(0)
