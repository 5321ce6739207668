"""The quality gate, its reports and merged exports on the demo model: what a version answers says if it is worse."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, RequestFailed, Sampling
from manylora.demo import BASE_FOLDER, adapter_folder, skills
from manylora.demo.skills import SKILLS, Skill

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT, NAME = "cedar", "words"
GATE = """\
tenant_id: cedar
adapters:
  gate: {samples: golden, min_score: 0.3, max_drop: 0.05, min_gain: 0.2}
"""
HALF_STEPS = 5


def samples(skill: Skill, count: int = 24) -> bytes:
    asked = skills.held_out_inputs(5, count)
    lines = [{"prompt": skills.prompt(text), "expected": skill.answer(text), "max_tokens": 32} for text in asked]
    return "\n".join(map(json.dumps, lines)).encode()


def skill_of(name: str) -> Skill:
    return next(skill for skill in SKILLS if skill.adapter == name)


def weakened(name: str, folder: Path, part: float) -> Path:
    """The demo's adapter with so much of its effect."""
    shutil.copytree(adapter_folder(name), folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * part}))
    return folder


async def answer(client: Client, adapter: str) -> str:
    sampling = Sampling(temperature=0.0)
    result = await client.complete(skills.prompt("a1b2c"), adapter=adapter, max_tokens=32, sampling=sampling)
    return result.text


@pytest.fixture(autouse=True)
async def _nothing_is_left(whole: UpCluster) -> AsyncIterator[None]:
    yield
    async with Client(whole.router) as client:
        for tenant in await client.tenants.list():
            if tenant.tenant_id in (TENANT, "elder"):
                await client.tenants.delete(tenant.tenant_id)


async def test_the_gate_stops_a_worse_version_and_lets_a_better_one_through(whole: UpCluster, tmp_path: Path) -> None:
    async with Client(whole.router, tenant=TENANT) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}")
        await client.adapters.add(TENANT, NAME, weakened(NAME, tmp_path / "weak", 0.3))
        await client.adapters.put_samples(TENANT, "golden", samples(skill_of(NAME)))
        await client.tenants.apply(GATE)
        better = await client.adapters.add(TENANT, NAME, adapter_folder(NAME))
        assert (better.number, better.state) == (2, "")
        _, report = await client.adapters.report(TENANT, NAME, 2)
        scores = report["quality"]["scores"]
        assert scores["candidate"] > 0.9 > scores["before"] > 0.1 > scores["base"]
        assert report["load"]["candidate"]["size_bytes"] == report["load"]["before"]["size_bytes"] == better.size_bytes
        await client.adapters.promote(TENANT, NAME)
        with pytest.raises(RequestFailed) as error:
            await client.adapters.add(TENANT, NAME, weakened(NAME, tmp_path / "weaker", 0.25))
        assert (error.value.code, error.value.reason) == ("FAILED_PRECONDITION", "ADAPTER_REJECTED")
        line = await client.adapters.history(TENANT, NAME)
        assert [(each.number, each.state) for each in line.versions] == [(1, ""), (2, ""), (3, "rejected")]
        assert (line.in_force, await answer(client, NAME)) == (2, "aonebtwoc")
    page = tmp_path / "page.html"
    out = await whole.manylora("adapter", "report", f"{NAME}@3", "--tenant", TENANT, "--html", str(page))
    assert out.exit_code == 0
    assert f"{TENANT}/{NAME}@3" in out.stdout
    assert "Samples that it gets wrong" in page.read_text()
    out = await whole.manylora("adapter", "check", str(tmp_path / "weak"), "--tenant", TENANT, "--name", NAME, "--json")
    assert (out.exit_code, out.json["verdict"]) == (1, "rejected")
    assert len(out.json["modules"]) == 28
    await exported(whole, tmp_path / "merged")


async def exported(cluster: UpCluster, folder: Path) -> None:
    out = await cluster.manylora(
        "adapter", "export", f"{NAME}@2", "--tenant", TENANT, "--model", "demo", "--merged", str(folder)
    )
    assert out.exit_code == 0, out.stderr
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(os.listdir(folder))
    again = await cluster.manylora(
        "adapter", "export", NAME, "--tenant", TENANT, "--model", "demo", "--merged", str(folder)
    )
    assert again.exit_code == 2


@pytest.mark.wide
async def test_the_gate_stops_an_adapter_that_was_trained_half_as_long(
    whole: UpCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, full = trained(skill_of("words"), tmp_path, monkeypatch)
    async with Client(whole.router, tenant="elder") as client:
        await client.tenants.apply("tenant_id: elder")
        await client.adapters.put_samples("elder", "golden", samples(skill_of("words")))
        await client.tenants.apply(GATE.replace(TENANT, "elder"))
        await client.adapters.add("elder", NAME, full)
        with pytest.raises(RequestFailed) as error:
            await client.adapters.add("elder", NAME, half)
        assert error.value.reason == "ADAPTER_REJECTED"
        _, report = await client.adapters.report("elder", NAME)
        scores = report["quality"]["scores"]
        assert scores["candidate"] < scores["before"] - 0.05
        await client.tenants.apply("tenant_id: elder")
        await client.adapters.add("elder", "other", half)
        await client.tenants.apply(GATE.replace(TENANT, "elder"))
        assert (await client.adapters.add("elder", "other", full)).number == 2


def trained(skill: Skill, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two adapters as the demo's are made, the second in twice as many steps."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import make_demo_model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base: Any = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE_FOLDER)
    monkeypatch.setattr(make_demo_model, "exact_match", lambda *_: 0.0)  # the cluster's answers are what counts
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for steps in (HALF_STEPS, 2 * HALF_STEPS):
            model = make_demo_model.train_adapter(base, tokenizer, skill, steps=steps, seed=11, inputs=())
            make_demo_model.save_adapter(model, folder / str(steps))
    finally:
        torch.set_num_threads(threads)
    return folder / str(HALF_STEPS), folder / str(2 * HALF_STEPS)
