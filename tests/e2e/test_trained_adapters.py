"""Through a running cluster: adapters that rotate positions in their own way, scale outputs and change the head, beside
plain ones, token for token as transformers + peft; contexts of their own at admission.
"""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import pytest
import torch
from manylora.client import Client, RequestFailed, Sampling
from manylora.local.cluster import ClusterOptions, LocalCluster
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import Reference, recipes, save_adapter
from tests.numerics.driver import prompts
from tests.numerics.families import make_model
from tests.numerics.test_columns import BIASED, RECIPES, reference, save_trained
from tests.numerics.test_rope import SCALINGS, put_scaled, references
from tests.numerics.test_token_rows import TOKENS

TENANT = "trained"
MAX_TOKENS = 16
LONGEST = 600
BASE_CONTEXT = 256
WORKER_FLAGS = ("--num-blocks=300", "--block-size=4", "--prefill-chunk-tokens=50", "--max-batch-tokens=64")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wide,
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings(r"ignore:Adapter 'default'. \d+ LoRA tensor"),
]


async def test_what_trainers_write(tmp_path: Path) -> None:
    base = tmp_path / "model"
    make_model("qwen2", base)
    oracles: dict[str, tuple[Reference, str | None]] = {}
    folders: dict[str, Path] = {}
    for seed, kind in enumerate(("dora", "both", "low", "apart")):
        folders[kind] = save_trained(base, tmp_path / kind, seed, (RECIPES | BIASED | TOKENS)[kind])
        oracles[kind] = reference(base, folders[kind]), "own"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = save_adapter(model, tmp_path / "plain", 5, **recipes("qwen2")["all-linear"])
    scaled = references(base, dict.fromkeys(SCALINGS, plain))
    for kind in ("linear", "yarn"):
        folders[kind] = put_scaled(plain, SCALINGS[kind]).rename(tmp_path / kind)
        oracles[kind] = scaled[kind], "own"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders["head"] = save_adapter(model, tmp_path / "head", 6, r=4, target_modules=["lm_head", "v_proj"])
    folders["plain"] = plain
    own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    shared = Reference(own, {name: folders[name] for name in ("plain", "head")})
    oracles |= {"plain": (shared, "plain"), "head": (shared, "head"), "": (shared, None)}
    short = prompts(len(oracles), seed=3)
    requests = [*zip(oracles, short, strict=True), ("linear", prompts(1, seed=8, shortest=400, longest=400)[0])]
    expected = [oracles[name][0].greedy(prompt, oracles[name][1], MAX_TOKENS) for name, prompt in requests]

    options = ClusterOptions(
        model=base, model_name="qwen2", data=tmp_path / "data", workers=1, worker_flags=WORKER_FLAGS,
        max_model_len=LONGEST,
    )  # fmt: skip
    async with LocalCluster(options) as cluster, Client(cluster.router, tenant=TENANT) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}\n")
        added = {name: await client.adapters.add(TENANT, name, folder) for name, folder in folders.items()}
        contexts = {name: each.max_context_tokens for name, each in added.items() if each.max_context_tokens}
        assert contexts == {"linear": LONGEST, "yarn": 256}

        async def complete(adapter: str, prompt: list[int]) -> list[int]:
            result = await client.complete(
                prompt, adapter=adapter, max_tokens=MAX_TOKENS, sampling=Sampling(temperature=0), ignore_eos=True,
                timeout_s=120,
            )  # fmt: skip
            return list(result.token_ids)

        got = await asyncio.gather(*(complete(*request) for request in requests))
        for (adapter, prompt), tokens, wanted in zip(requests, got, expected, strict=True):
            assert tokens == wanted, (adapter, len(prompt))
        for adapter in ("", "plain", "yarn"):
            with pytest.raises(RequestFailed, match=f"context takes at most {BASE_CONTEXT - 1}"):
                await complete(adapter, requests[-1][1])
        with pytest.raises(RequestFailed, match="goes with no other or weight"):
            await complete("dora+plain", [5, 6])
