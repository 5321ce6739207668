"""Two pools in one cluster, each with a model, a tokenizer and adapters of its own: what either answers is what
transformers and PEFT answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora.client import Client, RequestFailed, Result, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.cluster import ClusterOptions, LocalCluster, PoolModel
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

POLICY = "tenant_id: acme\npools: [default, small]\n"
TEXT = "Two pools."
TOKENS = 12


def make_small(folder: Path) -> tuple[Path, Path]:
    """A model with a tokenizer that gives each byte another number than the demo's, and an adapter of it."""
    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet(), reverse=True))}
    tokenizer = Tokenizer(BPE(vocab={**alphabet, "<end>": len(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=len(alphabet),
        bos_token_id=None,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "small")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "small")
    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    config_file = folder / "adapter" / "adapter_config.json"
    told = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**told, "base_model_name_or_path": "small"}))
    return folder / "small", folder / "adapter"


def expected(folder: Path, adapter: Path | None) -> list[int]:
    """Greedy, by transformers and PEFT."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        made = model.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return [int(token) for token in made[0, ids.shape[1] :]]


async def ask(client: Client, **what: Any) -> Result:
    greedy = Sampling(temperature=0.0)
    return await client.complete(TEXT, tenant="acme", max_tokens=TOKENS, ignore_eos=True, sampling=greedy, **what)


async def test_two_pools_answer_as_their_models_do(tmp_path: Path) -> None:
    small, adapter = make_small(tmp_path)
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name=BASE_NAME,
        data=tmp_path / "data",
        pools=(PoolModel("small", small, "small-base"),),
        http_port=0,
        kv_cache_mb=16,
        start_timeout_s=240.0,
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as client:
        await client.tenants.apply(POLICY)
        await client.adapters.add("acme", "upper", adapter_folder("upper"))
        added = await client.adapters.add("acme", "mine", adapter, pool="small")
        assert added.pool == "small"
        for model in ("small", "small-base"):
            assert list((await ask(client, model=model)).token_ids) == expected(small, None)
        assert list((await ask(client, adapter="mine")).token_ids) == expected(small, adapter)
        assert list((await ask(client)).token_ids) == expected(BASE_FOLDER, None)
        assert list((await ask(client, adapter="upper")).token_ids) == expected(BASE_FOLDER, adapter_folder("upper"))
        with pytest.raises(RequestFailed, match="has another base model"):
            await ask(client, model=BASE_NAME, adapter="mine")
        with pytest.raises(RequestFailed, match="adapter"):
            await client.adapters.add("acme", "wrong", adapter, pool="default")
        models = await client.list_models(tenant="acme")
        assert [(each.name, each.pool) for each in models.pools] == [(BASE_NAME, "default"), ("small-base", "small")]
        status = await client.status()
        assert {worker.worker_id: worker.pool for worker in status.workers} == {
            "worker-0": "default",
            "worker-small-0": "small",
        }
        assert [(pool.pool, pool.base_model, pool.workers) for pool in status.scheduler.pools] == [
            ("default", BASE_NAME, 1),
            ("small", "small-base", 1),
        ]
        told = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "manylora", "generate", TEXT, "--raw", "--model", "small", "--tenant", "acme"],
            env={**os.environ, "MANYLORA_SERVER": cluster.router},
            capture_output=True,
            check=True,
        )
        assert told.stdout
