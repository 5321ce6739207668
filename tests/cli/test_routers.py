"""A client of several routers: the next takes over from one that is gone."""

from __future__ import annotations

import pytest
from manylora.client import Client, RequestFailed, RetryPolicy
from manylora.client.routers import addresses
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter

QUICK = RetryPolicy(max_attempts=3, base_delay_s=0.001, max_delay_s=0.1)


def test_addresses_are_between_commas() -> None:
    assert addresses("a:1") == ["a:1"]
    assert addresses(" a:1, [::1]:2,") == ["a:1", "[::1]:2"]
    assert addresses("") == [""]


async def test_a_call_goes_to_the_next_router_and_stays_there(address: str, router: FakeRouter, nobody: str) -> None:
    async with Client(f"{nobody},{address}", tenant="acme", retry=QUICK) as client:
        assert (await client.complete("one two")).text == "ONE TWO"
        await client.list_models()
        assert client._caller.channel._current == 1  # type: ignore[attr-defined]


async def test_what_none_took_is_sent_to_each_though_it_must_not_be_repeated(address: str, nobody: str) -> None:
    async with Client(f"{nobody},{address}", retry=None) as client:
        key, _ = await client.keys.create(["operator"])
        assert key.startswith("mlk-")


async def test_a_router_that_dies_is_left_for_the_other(address: str, router: FakeRouter) -> None:
    dying = await GrpcTransport().serve("127.0.0.1:0", FakeRouter().services())
    async with Client(f"{dying.address},{address}", tenant="acme", retry=QUICK) as client:
        assert (await client.complete("first")).text == "FIRST"
        assert router.requests == []
        await dying.stop(0)
        assert (await client.complete("second")).text == "SECOND"
        assert [request.text for request in router.requests] == ["second"]


async def test_a_refusal_is_no_reason_to_ask_another(address: str, router: FakeRouter, nobody: str) -> None:
    async with Client(f"{address},{nobody}", tenant="acme", retry=None) as client:
        for _ in range(2):
            with pytest.raises(RequestFailed, match=r"sampling\.temperature"):
                await client.complete("two wrongs")
        assert len(router.requests) == 2


async def test_where_no_router_answers_all_are_named(nobody: str) -> None:
    async with Client(f"{nobody},{nobody}", tenant="acme", retry=None) as client:
        with pytest.raises(RequestFailed, match=f"nothing answers at {nobody},{nobody}"):
            await client.complete("one")


async def test_the_command_line_takes_several(manylora: Manylora, address: str, nobody: str) -> None:
    out = await manylora("generate", "--server", f"{nobody},{address}", "--tenant", "acme", "one two")
    assert (out.exit_code, out.stdout) == (0, "ONE TWO\n")
