"""What the libraries that one would use without a server make of the same traffic, on one GPU; JSON lines.

    peft-mixed               peft's generate(adapter_names=[...]): every request with one of `--adapters` adapters
    transformers-base        the same generate without adapters
    transformers-continuous  transformers' continuous batching (generate_batch), without adapters

`--batch` greedy requests at once, 128 tokens in and 128 out (`--prompt-tokens`, `--new-tokens`), of a model with random
weights; r16 on all seven projections, as in bench/engine.py's decode-distinct. A line is {"bench": "peers", "case",
"batch", "adapters", "tokens_per_s", "ms_per_step", ...}: `tokens_per_s` counts what was generated against all of the
time, prompts included; `ms_per_step` is the time of a step that only decodes (that of all tokens less that of one),
which bench/engine.py's `ms_per_step` compares with.

    python bench/peers/generate.py [--cases peft-mixed,...] [--batch 64] [--device cuda]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
Run = Callable[[int], int]
"""Generates so many tokens for every request; returns how many there were in all."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="peft-mixed,transformers-base,transformers-continuous")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=16384, tie_word_embeddings=False)
    config.eos_token_id = None
    with torch.device(options.device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def with_adapters(model: LlamaForCausalLM, options: argparse.Namespace) -> Any:
    """The model with `--adapters` adapters of random weights, named "0", "1", ..."""
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped: Any = get_peft_model(model, lora, adapter_name="0", autocast_adapter_dtype=False)
    for i in range(1, options.adapters):
        wrapped.add_adapter(str(i), lora, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)
    return wrapped.eval()


def generate(model: Any, prompts: torch.Tensor, names: list[str] | None) -> Run:
    more = {} if names is None else {"adapter_names": names}

    def run(tokens: int) -> int:
        with torch.inference_mode():
            output = model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens,
                min_new_tokens=tokens, do_sample=False, pad_token_id=0, **more,
            )  # fmt: skip
        return int((output.shape[1] - prompts.shape[1]) * output.shape[0])

    return run


def continuous(model: Any, prompts: torch.Tensor) -> Run:
    def run(tokens: int) -> int:
        generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(prompts.tolist(), generation_config=generation, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def timed(options: argparse.Namespace, run: Run, tokens: int) -> float:
    started = time.perf_counter()
    made = run(tokens)
    if options.device == "cuda":
        torch.cuda.synchronize()
    if made != options.batch * tokens:
        raise SystemExit(f"{made} tokens were made, not {options.batch * tokens}")
    return time.perf_counter() - started


def measure(options: argparse.Namespace, case: str, run: Run, adapters: int) -> None:
    count = options.new_tokens
    timed(options, run, min(8, count))
    whole = statistics.median(timed(options, run, count) for _ in range(options.repetitions))
    first = statistics.median(timed(options, run, 1) for _ in range(options.repetitions))
    line = {
        "bench": "peers",
        "case": case,
        "shape": options.shape,
        "batch": options.batch,
        "adapters": adapters,
        "rank": options.rank if adapters else 0,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": count,
        "tokens_per_s": round(options.batch * count / whole, 1),
        "ms_per_step": round((whole - first) / (count - 1) * 1e3, 3),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    options = parse_arguments()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the libraries', about options that do not matter here
    cases = options.cases.split(",")
    model = make_model(options)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.prompt_tokens)
    prompts = torch.randint(3, SHAPES[options.shape]["vocab_size"], shape, generator=generator).to(options.device)
    if "transformers-base" in cases:
        measure(options, "transformers-base", generate(model, prompts, None), 0)
    if "transformers-continuous" in cases:
        measure(options, "transformers-continuous", continuous(model, prompts), 0)
    if "peft-mixed" in cases:  # last: it changes the model
        names = [str(i % options.adapters) for i in range(options.batch)]
        measure(options, "peft-mixed", generate(with_adapters(model, options), prompts, names), options.adapters)
    sys.stdout.flush()
    os._exit(0)  # transformers' manager thread does not end by itself


if __name__ == "__main__":
    main()
