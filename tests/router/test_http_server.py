"""The server's start and end, as the router has it."""

from __future__ import annotations

import random

import openai
import pytest
from http_fakes import http_front
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_shared.telemetry import Telemetry
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.documents import MemoryDocuments
from manylora_sim.fake_text import FakeText
from manylora_sim.network import MemoryNetwork
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStoreServer


def router(listen: str) -> RouterApp:
    return RouterApp(
        RouterConfig(adapter_store="unused", router_id="router-0", http_listen=listen),
        transport=MemoryNetwork(random.Random(1)).transport("router"),
        store=MemoryStoreServer().client(),
        text=FakeText(),
        adapter_store=(files := MemoryAdapterFiles()),
        documents=MemoryDocuments(files),
        telemetry=Telemetry.recording("router"),
        rng=random.Random(1),
        peer_secret=SIMULATED,
    )


async def test_a_router_serves_http_where_it_is_told_to() -> None:
    app = router("127.0.0.1:0")
    await app.start()
    try:
        url = f"http://{app.endpoints['http']}"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert await client.get("/health", cast_to=dict) == {}
    finally:
        await app.stop(0.0)
    assert router("").endpoints == {}


async def test_a_taken_port_is_an_error() -> None:
    async with http_front() as front:
        app = router(front.server.address)
        with pytest.raises(OSError, match="cannot listen on"):
            await app.start()
        await app.stop(0.0)


async def test_stopping_twice_is_once() -> None:
    async with http_front() as front:
        await front.server.stop(0.0)
        await front.server.stop(0.0)
