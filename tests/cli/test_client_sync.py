"""The blocking client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from manylora.client import RequestFailed, SyncClient

from tests.cli.fake_server import FakeRouter


async def test_the_blocking_client_does_the_same(address: str, router: FakeRouter, adapter_folder: Path) -> None:
    script = f"""
from manylora.client import Delta, RequestFailed, SyncClient
with SyncClient({address!r}, tenant="acme") as client:
    client.wait_until_serving(5)
    client.tenants.apply("tenant_id: acme")
    client.adapters.add("acme", "upper", {str(adapter_folder)!r})
    print([e.text for e in client.generate("one two") if isinstance(e, Delta)])
    print(client.complete("three").text, client.list_models().base_model, client.status().scheduler.epoch)
    with client.generate("hang on") as stream:
        for event in stream:
            if isinstance(event, Delta):
                break
    left = client.generate("hang on")
    for event in left:
        if isinstance(event, Delta):
            break
    try:
        client.tenants.get("nobody")
    except RequestFailed as error:
        print(error.code, [t.adapters for t in client.tenants.list()], len(client.adapters.list("acme")))
client.close()
left.cancel()
for call in (client.status, left.collect, lambda: client.complete("x")):
    try:
        call()
    except RequestFailed as error:
        print(error)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    stdout, stderr = await process.communicate()
    assert (process.returncode, stderr.decode()) == (0, "")
    told = ["['ONE', ' TWO']", "THREE tiny 5", "NOT_FOUND [1] 1"]
    assert stdout.decode().splitlines() == [*told, *["FAILED_PRECONDITION: this client is closed"] * 3]
    assert router.cancelled == 2


async def test_a_close_ends_what_another_thread_waits_for(address: str) -> None:
    client = await asyncio.to_thread(SyncClient, address, tenant="acme")
    stream = client.generate("hang on")
    for _ in range(2):  # Started, and the only Delta
        await asyncio.to_thread(next, stream)
    waiting = asyncio.ensure_future(asyncio.to_thread(stream.collect))
    await asyncio.to_thread(client.close)
    with pytest.raises(RequestFailed):
        await asyncio.wait_for(waiting, 30)
