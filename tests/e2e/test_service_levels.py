"""An adapter whose files vanish: its tenant's requests are refused until they are back, and the status tells it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from manylora.client import Client, RequestFailed, Sampling
from manylora.demo import adapter_folder, skills
from manylora_router.guard.circuits import ADAPTER_THRESHOLD

from tests.e2e.conftest import UpCluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "dove"
POLICY = f"""\
tenant_id: {TENANT}
classes:
  interactive: {{weight: 4, slo: {{ttft_p95_ms: 60000, availability: 0.5}}}}
"""
GREEDY = Sampling(temperature=0.0)


async def _forgotten(cluster: UpCluster) -> None:
    """No worker has an adapter in memory any more: one has each that was registered, since it tried its first step."""
    before = {name: cluster.pid(name) for name in ("worker-0", "worker-1")}
    for name in before:
        cluster.kill(name)
    async with asyncio.timeout(90):
        while any(cluster.pid(name) == pid for name, pid in before.items()):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)


async def test_an_adapter_whose_files_vanish(whole: UpCluster, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(adapter_folder("upper"), mine)
    config = json.loads((mine / "adapter_config.json").read_text())
    config["lora_alpha"] *= 0.999  # so that no other tenant has the same content
    (mine / "adapter_config.json").write_text(json.dumps(config))

    async with Client(whole.router, retry=None) as operator:
        await operator.tenants.apply(POLICY)
        version = (await operator.adapters.add(TENANT, "fleeting", mine)).version
        key, _ = await operator.keys.create(["generate"], tenant=TENANT)
        await _forgotten(whole)
        folder = whole.adapter_store / "objects" / version
        away = whole.adapter_store / "objects-away"
        folder.rename(away)
        try:
            async with Client(whole.router, key=key, retry=None) as client:

                async def ask(adapter: str = "fleeting") -> str:
                    result = await client.complete(
                        skills.prompt("ab3"),
                        adapter=adapter,
                        max_tokens=16,
                        qos_class="interactive",
                        sampling=GREEDY,
                        timeout_s=30,
                    )
                    return result.text

                for _ in range(ADAPTER_THRESHOLD):
                    with pytest.raises(RequestFailed) as raised:
                        await ask()
                    assert raised.value.code == "FAILED_PRECONDITION"
                    assert raised.value.result is not None
                    assert raised.value.result.outcome == "adapter_failed"
                with pytest.raises(RequestFailed) as raised:
                    await ask()
                assert (raised.value.code, raised.value.result) == ("UNAVAILABLE", None)
                assert raised.value.retry_after_s is not None
                assert 0 < raised.value.retry_after_s <= 1
                for _ in range(ADAPTER_THRESHOLD):
                    await ask("")

                status = (await whole.manylora("status", "--json", "--key", key)).json
                (slo,) = status["slos"]
                (circuit,) = status["circuits"]
                assert (slo["tenant_id"], slo["qos_class"]) == (TENANT, "interactive")
                assert (slo["requests"], slo["failed"]) == (2 * ADAPTER_THRESHOLD + 1, ADAPTER_THRESHOLD + 1)
                assert slo["availability"] == pytest.approx(5 / 11)
                assert slo["error_budget"] == pytest.approx(1 - 6 / 5.5)
                assert (slo["measured"], slo["ttft_p95_target_ms"], slo["ttft_met"]) == (5, 60_000, True)
                assert 0 < slo["ttft_p50_ms"] <= slo["ttft_p95_ms"] < 60_000
                assert slo["tpot_p50_ms"] > 0
                assert (circuit["tenant_id"], circuit["adapter_version"]) == (TENANT, version)
                table = (await whole.manylora("status")).stdout
                assert f"adapter {version[:12]}" in table
                assert "60000 ms, met" in table
                async with Client(whole.router, tenant="acme", retry=None) as other:
                    upper = await other.complete(skills.prompt("ab3"), adapter="upper", max_tokens=16, sampling=GREEDY)
                assert upper.text == "AB3"

                away.rename(folder)
                async with asyncio.timeout(30):
                    while True:
                        try:
                            assert await ask() == "AB3"
                            break
                        except RequestFailed as error:
                            if error.code != "UNAVAILABLE":
                                raise
                            await asyncio.sleep(error.retry_after_s or 0.1)
                assert (await client.status()).circuits == ()
        finally:
            if away.exists():
                away.rename(folder)
            await operator.tenants.delete(TENANT)
