"""Tokens per second of 16 concurrent requests on 8 adapters, on the CPU, in one process and one run; JSON lines.

Four contenders run the same random model (same weights, same prompts, greedy, the same number of new tokens):

    manylora                 EngineCore + TorchModelRunner, every request with one of the 8 adapters
    manylora_base            the same without adapters, for what the adapters cost
    peft_mixed               peft's mixed-batch generate(adapter_names=[...]), the adapters as above
    transformers_continuous  transformers' continuous batching (generate_batch), without adapters

They take turns, `--repetitions` times after a warm-up each, so that a slow minute of the machine hits all of them. One
line a measurement (with the processor's seconds, which tell a busy machine from a slow contender), and one `summary`
line with medians and the ratios of medians: manylora over peft_mixed, and manylora (with its adapters) over
transformers_continuous (without).

Run it on a machine that does nothing else: with two threads, every operation waits for the slower core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.stores.adapter_files import adapter_digest
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.models.build import build_engine
from manylora_worker.planning.step_planner import PlannerLimits
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

GIB = 1 << 30
Contender = Callable[[], int]
"""Runs all requests once; returns how many tokens it made."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="mean; prompts differ by up to a quarter")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--contenders", default="", help="comma list; default: all")
    return parser.parse_args()


def make_files(arguments: argparse.Namespace, folder: Path) -> dict[str, AdapterUid]:
    """Writes the model, and the adapters in the layout of an adapter store; returns adapter name -> uid."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64 // 4 or 1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    uids = {}
    for i in range(arguments.adapters):
        lora = LoraConfig(r=arguments.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, lora)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        wrapped.peft_config["default"].base_model_name_or_path = "model"
        wrapped.save_pretrained(folder / f"adapter-{i}", save_embedding_layers=False)
        model = wrapped.unload()
        source = folder / f"adapter-{i}"
        config_json = json.loads((source / "adapter_config.json").read_text())
        uids[f"adapter-{i}"] = AdapterUid(adapter_digest(config_json, source / "adapter_model.safetensors"))
        target = folder / "store" / "objects" / uids[f"adapter-{i}"]
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    return uids


def make_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(0)
    spread = arguments.prompt_tokens // 4
    lengths = [arguments.prompt_tokens + rng.randint(-spread, spread) for _ in range(arguments.requests)]
    return [[rng.randrange(3, arguments.vocab) for _ in range(length)] for length in lengths]


class Manylora:
    """The engine as a worker runs it, driven in this thread."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> None:
        parts = build_engine(
            WorkerConfig(
                model=str(folder / "model"),
                adapter_store=str(folder / "store"),
                threads=arguments.threads,
                kv_cache_mb=512,
            )
        )
        self.backend = parts.backend
        self._core = EngineCore(
            parts.runner,
            parts.backend,
            EngineLimits(
                planner=PlannerLimits(
                    max_batch_tokens=512, prefill_chunk_tokens=256, sequence_slots=arguments.requests
                ),
                adapters=AdapterCacheLimits(host_bytes=4 * GIB, device_bytes=4 * GIB),
                max_requests=arguments.requests,
            ),
        )
        self._prompts = prompts
        self._new_tokens = arguments.new_tokens
        self._runs = 0

    def run(self, uids: list[AdapterUid | None]) -> int:
        self._runs += 1
        for i, (prompt, uid) in enumerate(zip(self._prompts, uids, strict=True)):
            request = EngineRequest(
                request_id=RequestId(f"{self._runs}-{i}"),
                tenant_id=TenantId(f"tenant-{i}"),
                qos_class=QosClass.STANDARD,
                adapter_uid=uid,
                prompt_token_ids=tuple(prompt),
                max_tokens=self._new_tokens,
                sampling=Sampling(seed=0, temperature=0.0),
            )
            self._core.add(request, 0.0)
        tokens = 0
        while self._core.has_work():
            steps_before = self._core.stats().steps
            tokens += sum(len(output.token_ids) for output in self._core.step(0.0))
            if self._core.stats().steps == steps_before:
                time.sleep(0.001)  # adapters are being loaded, in the warm-up
        self._core.take_ended()
        return tokens


def peft_contender(
    arguments: argparse.Namespace, folder: Path, prompts: list[list[int]], names: list[str], uids: dict[str, AdapterUid]
) -> Contender:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model: Any = None
    for name, uid in uids.items():
        path = folder / "store" / "objects" / uid
        if model is None:
            model = PeftModel.from_pretrained(base, path, adapter_name=name)
        else:
            model.load_adapter(path, name)
    model.eval()
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    count = arguments.new_tokens

    def run() -> int:
        with torch.inference_mode():
            output = model.generate(
                input_ids=input_ids, attention_mask=mask, adapter_names=names, max_new_tokens=count,
                min_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return int((output.shape[1] - longest) * output.shape[0])

    return run


def continuous_contender(arguments: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> Contender:
    """Set up once, as a server would have it; only the requests are timed."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    generation = GenerationConfig(max_new_tokens=arguments.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = transformers.ContinuousBatchingConfig(
        block_size=32, num_blocks=16 * arguments.requests, max_batch_tokens=512, allow_block_sharing=False,
        use_cuda_graph=False,
    )  # fmt: skip

    def run() -> int:
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=blocks, progress_bar=False,
            persistent_manager=True, warmup=False,
        )  # fmt: skip
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def main() -> None:
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of the contenders, about options that do not matter here
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        uids = make_files(arguments, folder)
        prompts = make_prompts(arguments)
        names = [f"adapter-{i % arguments.adapters}" for i in range(arguments.requests)]
        ours = Manylora(arguments, folder, prompts)
        contenders: dict[str, Contender] = {
            "manylora": lambda: ours.run([uids[name] for name in names]),
            "manylora_base": lambda: ours.run([None] * arguments.requests),
            "peft_mixed": peft_contender(arguments, folder, prompts, names, uids),
            "transformers_continuous": continuous_contender(arguments, folder, prompts),
        }
        wanted = arguments.contenders.split(",") if arguments.contenders else list(contenders)
        try:
            measure({name: contenders[name] for name in wanted}, arguments)
        finally:
            ours.backend.close()
    sys.stdout.flush()
    os._exit(0)  # transformers' manager thread does not end by itself


def measure(contenders: dict[str, Contender], arguments: argparse.Namespace) -> None:
    emit(
        {
            "event": "setup",
            **vars(arguments),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "dtype": "float32",
        }
    )
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    expected = arguments.requests * arguments.new_tokens
    for repetition in range(-1, arguments.repetitions):
        for name, run in contenders.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = run()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            if tokens != expected:
                raise SystemExit(f"{name} made {tokens} tokens, not {expected}")
            line = {
                "contender": name,
                "tokens": tokens,
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "tokens_per_s": tokens / seconds,
            }
            emit({"event": "warmup" if repetition < 0 else "measurement", "repetition": repetition, **line})
            if repetition >= 0:
                rates[name].append(tokens / seconds)
    medians = {name: statistics.median(values) for name, values in rates.items() if values}
    ratios = {
        f"manylora_over_{other}": medians["manylora"] / medians[other]
        for other in medians
        if other != "manylora" and "manylora" in medians
    }
    emit({"event": "summary", "median_tokens_per_s": medians, **ratios})


def emit(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
