"""A cluster with a draft model: a class whose policy drafts gets the answers, the usage and the bill of fair queuing of
one whose policy does not, and metrics tell how many guesses were right.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from manylora.client import Client, Result, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

pytestmark = pytest.mark.e2e

POLICY = "tenant_id: {}\nclasses: {{standard: {{weight: 4{}}}}}\n"
IDLE_LAYERS = 12
TOKENS = 192
RUNNING = 300  # tokens of a request that is seen at work
PROMPTS = ("once upon a time", "guesses", "abcabcabc")


def with_idle_layers(folder: Path) -> Path:
    """The demo model with layers that add nothing: the demo model guesses all that it says, at a fourth of its work."""
    small = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    config = small.config
    count = config.num_hidden_layers
    config.num_hidden_layers, config.layer_types = count + IDLE_LAYERS, None
    large = LlamaForCausalLM(config)
    large.load_state_dict(small.state_dict(), strict=False)
    for layer in large.model.layers[count:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    return folder


async def ask(client: Client, tenant: str, prompt: str, sampling: Sampling) -> Result:
    return await client.complete(
        prompt, tenant=tenant, sampling=sampling, max_tokens=TOKENS, ignore_eos=True, timeout_s=120
    )


async def cost_of(client: Client, tenant: str, at_least: int) -> int:
    """What fair queuing has charged, which a status tells while one of its requests runs: with some of this one's."""
    async with client.generate("on", tenant=tenant, max_tokens=RUNNING, ignore_eos=True, timeout_s=120) as running:
        async for _ in running:
            flows = [each for each in (await client.status()).scheduler.flows if each.tenant_id == tenant]
            if flows and flows[0].served_cost > at_least:
                return flows[0].served_cost
    raise AssertionError(f"{tenant} was charged for less than what it got")


async def settled(client: Client, tenant: str) -> int:
    """Tokens of its requests, once all are settled."""
    async with asyncio.timeout(30):
        while True:
            (quota,) = [each for each in (await client.status()).scheduler.quotas if each.tenant_id == tenant]
            if not quota.requests:
                return quota.settled_tokens
            await asyncio.sleep(0.1)


def told(address: str) -> list[float]:
    """Guesses, and the right ones, as the worker's metrics have them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    names = [f"manylora_speculation_{name}_total" for name in ("guessed_tokens", "right_guesses")]
    return [sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))) for name in names]


async def test_answers_usage_and_costs_are_those_without_a_draft_model(tmp_path: Path) -> None:
    options = ClusterOptions(
        model=with_idle_layers(tmp_path / BASE_NAME), model_name=BASE_NAME, data=tmp_path / "data",
        draft_model=str(BASE_FOLDER), threads=1, kv_cache_mb=64,
    )  # fmt: skip
    asked = [(prompt, Sampling(temperature=0)) for prompt in PROMPTS]
    asked.append((PROMPTS[0], Sampling(temperature=0.5, seed=3)))
    async with LocalCluster(options) as cluster, Client(cluster.router, retry=None) as client:
        for tenant, how in (("plain", ""), ("drafter", ", speculation: draft")):
            await client.tenants.apply(POLICY.format(tenant, how))
        answers: dict[str, list[Result]] = {}
        for tenant in ("plain", "drafter"):
            own = answers[tenant] = [await ask(client, tenant, prompt, sampling) for prompt, sampling in asked]
            drawn = sum(each.usage.completion_tokens for each in own)
            assert drawn == TOKENS * len(asked)
            computed = sum(each.usage.prompt_tokens - each.usage.cached_prompt_tokens for each in own)
            assert await settled(client, tenant) == drawn + computed
            charged = await cost_of(client, tenant, computed * PROMPT_TOKEN_COST + drawn * OUTPUT_TOKEN_COST)
            assert charged <= (computed + 2) * PROMPT_TOKEN_COST + (drawn + RUNNING) * OUTPUT_TOKEN_COST
            (worker,) = (await client.status()).workers
            assert (worker.guessed_tokens > 0) == (tenant == "drafter")
            assert [each.choices[0].token_ids for each in own] == [
                each.choices[0].token_ids for each in answers["plain"]
            ]
            assert [each.usage for each in own] == [each.usage for each in answers["plain"]]
        (worker,) = (await client.status()).workers
        assert worker.guessed_tokens >= worker.right_guesses > RUNNING
        (address,) = [at for name, at in cluster.metrics_addresses.items() if name.startswith("worker")]
        async with asyncio.timeout(30):
            while await asyncio.to_thread(told, address) < [worker.guessed_tokens, worker.right_guesses]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
