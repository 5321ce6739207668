"""Two routers as processes: a key's work is done once at both, events go on at the other one, and what went with a
router that was killed is refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from manylora.client import Client, RequestFailed
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_sim.fake_runner import reference_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "acme"
PROMPT = [5, 6, 7]
TOKENS = 120
BODY = {"model": "fake", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "seed": 1}


async def events(http: str, key: str, most: int = 1000, **headers: str) -> list[str]:
    """The first of them; then the connection is cut."""
    found: list[str] = []
    sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", f"http://{http}/v1/completions", json=BODY, headers=sent) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        text = ""
        async for part in answer.aiter_text():
            *whole, text = (text + part).split("\n\n")
            found += whole
            if len(found) >= most:
                break
    return found[:most]


def id_of(event: str) -> str:
    return event.partition("\n")[0].removeprefix("id: ")


async def refusal(client: Client) -> RequestFailed:
    """In the end: until its lease has ended, the router that was killed is asked."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True, idempotency_key="k")
            except RequestFailed as e:
                if e.reason != "ANSWERED_ELSEWHERE":
                    return e
            await asyncio.sleep(0.2)


async def test_keys_and_events_over_two_routers(tmp_path: Path) -> None:
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=tmp_path / "data",
        workers=1,
        routers=2,
        http_port=0,
        worker_module="manylora_sim.worker",
        worker_flags=("--fake-step-ms=10",),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as operator:
        await operator.tenants.apply(f"tenant_id: {TENANT}\n")
        key = (await operator.keys.create(["generate"], tenant=TENANT))[0]
        await asyncio.sleep(0.5)  # the other router hears of both
        clients = [Client(address, key=key, retry=None) for address in cluster.router_addresses]
        asked = {"max_tokens": TOKENS, "ignore_eos": True, "idempotency_key": "k"}
        stream = clients[0].generate(PROMPT, **asked)  # type: ignore[arg-type]
        await anext(stream)
        joined = await clients[1].complete(PROMPT, **asked)  # type: ignore[arg-type]
        assert joined == await stream.collect()
        assert list(joined.token_ids) == reference_tokens(PROMPT, None, joined.seed, 0, TOKENS)
        here, there = cluster.http_addresses
        head = await events(here, key, 5, x_keep_s="10")
        tail = await events(there, key, last_event_id=id_of(head[-1]))
        numbers = [id_of(event).rpartition("-")[2] for event in [*head, *tail]]
        assert numbers == [str(i + 1) for i in range(len(numbers))]
        os.kill(cluster.pids["router-0"], signal.SIGKILL)
        failed = await refusal(clients[1])
        assert failed.reason == "ANSWER_LOST"
        for client in clients:
            await client.close()
